# SPDX-License-Identifier: Apache-2.0
"""A model of one Sapphire Rapids core that is fed with executed instructions: how many cycles they may take.

An out-of-order core at its best: instructions enter in order, six micro-operations a cycle, and each is executed as
soon as its operands, a port and the tile unit are free. Operands are tracked through registers, tiles and cache lines;
caches hold what the addresses in the trace have brought. Not modelled: instruction fetch, branch misses, address
translation, bank conflicts, hardware prefetch, clock reductions. So it is an estimate, and an optimistic one.

Figures (cycles between two, cycles to the result) are from the chapter on AMX of Intel's optimization reference manual:
TDP* 16 and 52, TILELOADD 8 and 45, TILESTORED 16, TILEZERO 0 and 16, LDTILECFG 204, TILERELEASE 13; vector instructions
have the two ports that 512-bit vectors have on these cores.
"""

from __future__ import annotations

import heapq
import re
import subprocess
from collections import Counter, OrderedDict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ALLOCATED, RETIRED, REORDER_BUFFER, SCHEDULER = 6, 8, 512, 205
L1, L2 = (48 << 10, 12), (2 << 20, 16)  # bytes, ways
L2_BYTES_PER_CYCLE, L3_BYTES_PER_CYCLE = 48, 21
L1_CYCLES, L2_MORE, L3_MORE = 7, 10, 55
FORWARD, TILE_FORWARD = 5, 15  # cycles more for a load of what was just stored, with a tile on one side
TDP_CYCLES, ROWS = 16, 16

ALU, VECTOR, SHUFFLE, SHIFT = ("p0", "p1", "p5", "p6", "p10"), ("p0", "p5"), ("p5",), ("p0",)
NARROW_VECTOR, LOAD, WIDE_LOAD = ("p0", "p1", "p5"), ("p11", "p2", "p3"), ("p2", "p3")
STORE_ADDRESS, STORE_DATA = ("p7", "p8"), ("store",)

Ports = tuple[str, ...]

# Name -> the ports of each of its micro-operations apart from memory, and cycles to the result. The first match counts.
TIMES: tuple[tuple[str, tuple[Ports, ...], int], ...] = (
    (r"tdp", (SHUFFLE,), 52),
    (r"tilezero", (), 16),
    (r"ldtilecfg", (ALU,) * 8, 204),
    (r"tilerelease", (ALU,), 13),
    (r"tile", (), 45),
    (r"v(movap|movup|movdq|movs[sd]|lddqu|broadcast|pbroadcast)", (), 0),
    (r"vp(and|or|xor|ternlog|add|sub|min|max|abs)|v(and|or|xor|andn)p", (VECTOR,), 1),
    (r"vpmulld", (VECTOR, VECTOR), 10),
    (r"vf|v(mul|add|sub|max|min)p|vcvtdq2ps|vcvtps2dq|vpdpb|vpmadd|vdpbf16", (VECTOR,), 4),
    (r"vps[rl][la]", (SHIFT,), 1),
    (r"vp?(erm|shuf|unpck|insert|extract|mov|ack|align)|vcvtph2ps|vpmov|vpcmp|vcmp", (SHUFFLE,), 3),
    (r"vzeroupper", (), 0),
    (r"v", (VECTOR,), 4),
    (r"k", (SHIFT,), 1),
    (r"j", (("p0", "p6"),), 1),
    (r"imul", (("p1",),), 3),
    (r"mov", (), 0),
    (r"(nop|endbr|data16|cs|prefetch)", (), 0),
    (r"", (ALU,), 1),
)
READS_DESTINATION = re.compile(
    r"tdp|vf|vpdp|vdpbf16|vpternlog|vpermi2|(add|sub|and|or|xor|inc|dec|neg|not|sh[lr]|sa[lr]|imul|adc|sbb|ro[lr]|cmov)"
)
WRITES_NOTHING = re.compile(r"cmp|test|j|push|k(or)?test|vucomis|vcomis|bt|call|ret|ldtilecfg|prefetch")
SETS_FLAGS = re.compile(r"(add|sub|and|or|xor|cmp|test|inc|dec|neg|sh[lr]|sa[lr]|imul|bt|kortest|ktest)")
READS_FLAGS = re.compile(r"j(?!mp)|cmov|set|adc|sbb")
MEMORY = re.compile(r"^(?:%[fg]s:)?(-?0x[0-9a-f]+|-?\d+)?\(([^)]*)\)")

GENERAL = ("rax", "rcx", "rdx", "rbx", "rsp", "rbp", "rsi", "rdi", *(f"r{number}" for number in range(8, 16)))


def _aliases() -> Iterator[tuple[str, str]]:
    for name in GENERAL[8:]:
        yield from ((name + part, name) for part in ("", "d", "w", "b"))
    for name in GENERAL[:8]:
        short = name[1:]
        low = short[0] + "l" if short[1] == "x" else short + "l"
        yield from ((alias, name) for alias in (name, "e" + short, short, low))


ALIASES = dict(_aliases())


def register(text: str) -> str:
    """``%zmm3`` and ``%ymm3`` are one register, as are ``%rax`` and ``%eax``."""
    name = text.lstrip("%")
    return ALIASES.get(name) or re.sub(r"^[xyz]mm", "vector", name)


def operands_of(text: str) -> list[str]:
    """``0x40(%rax,%rcx,8),%zmm1{%k1}{z}`` -> its two operands."""
    return re.findall(r"(?:\([^)]*\)|[^,(])+", re.sub(r"<[^>]*>|\s*#.*", "", text).strip())


@dataclass
class Instruction:
    """One instruction of the program: what it needs, and where."""

    name: str
    length: int
    ports: tuple[Ports, ...]
    latency: int
    reads: set[str] = field(default_factory=set)
    writes: set[str] = field(default_factory=set)
    address: tuple[int, str | None, str | None, int] | None = None
    loads: bool = False
    stores: bool = False
    size: int = 8

    @property
    def moves_tile(self) -> bool:
        return self.name in ("tileloadd", "tileloaddt1", "tilestored")

    @property
    def micro_operations(self) -> int:
        if self.moves_tile:
            return ROWS
        return max(1, len(self.ports) + (self.stores or (self.loads and not self.ports)))


def parse(name: str, text: str, length: int) -> Instruction:
    """An instruction as ``objdump -d`` prints it."""
    operands = operands_of(text)
    _, ports, latency = next(row for row in TIMES if re.match(row[0], name))
    wide = any("%zmm" in operand for operand in operands)
    if not wide and ports == (VECTOR,):
        ports = (NARROW_VECTOR,)
    one = Instruction(name, length, ports, latency)
    one.size = 64 if wide else 32 if "%ymm" in text else 16 if "%xmm" in text else 8
    if "{1to" in text or name in ("vbroadcastss", "vpbroadcastd", "vmovss"):
        one.size = 4
    if name.startswith(("nop", "data16", "cs", "endbr")):
        return one
    for position, operand in enumerate(operands):
        last = position == len(operands) - 1
        if found := MEMORY.match(operand):
            parts = [part.strip() for part in found[2].split(",")]
            base, index = (register(parts[i]) if len(parts) > i and parts[i] else None for i in range(2))
            one.address = (int(found[1] or "0", 0), base, index, int(parts[2]) if len(parts) > 2 else 1)
            one.reads |= {part for part in (base, index) if part and part != "rip"}
            if not name.startswith("lea"):
                one.stores = last and not WRITES_NOTHING.match(name) and not name.startswith("tileload")
                one.loads = not one.stores or bool(READS_DESTINATION.match(name))
            continue
        plain = re.sub(r"\{.*", "", operand).strip()
        if not plain.startswith("%"):
            continue
        mask = re.search(r"\{%(k\d)\}", operand)
        one.reads |= {mask[1]} if mask else set()
        if last and not WRITES_NOTHING.match(name):
            one.writes.add(register(plain))
            if READS_DESTINATION.match(name) or (mask and "{z}" not in operand):
                one.reads.add(register(plain))
        else:
            one.reads.add(register(plain))
    if re.match(r"vpxor|vxorps|xor", name) and len(set(operands)) == 1:
        one.reads, one.ports, one.latency = set(), (), 0
    if SETS_FLAGS.match(name):
        one.writes.add("flags")
    if READS_FLAGS.match(name):
        one.reads.add("flags")
    return one


def disassemble(library: Path) -> tuple[dict[int, Instruction], dict[str, tuple[int, int]]]:
    """Address -> instruction, and function -> its range of addresses, relative to where the library is loaded."""
    command = ["objdump", "-d", "-w", "--no-show-raw-insn", str(library)]
    listing = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    rows: list[tuple[int, str, str]] = []
    starts: list[tuple[int, str]] = []
    for line in listing.splitlines():
        if start := re.fullmatch(r"([0-9a-f]+) <(.+)>:", line):
            starts.append((int(start[1], 16), start[2]))
        elif one := re.fullmatch(r"\s*([0-9a-f]+):\t(?:\{\w+\} )?(\S+)\s*(.*)", line):
            rows.append((int(one[1], 16), one[2], one[3]))
    ends = [row[0] for row in rows[1:]] + [rows[-1][0] + 16]
    code = {at: parse(name, text, end - at) for (at, name, text), end in zip(rows, ends, strict=True)}
    stops = [start for start, _ in starts[1:]] + [ends[-1]]
    return code, {name: (start, stop) for (start, name), stop in zip(starts, stops, strict=True)}


class Port:
    """Cycles of a unit that can begin something each cycle; the earliest free one from a time on."""

    def __init__(self) -> None:
        self.later: dict[int, int] = {}
        self.used = 0

    def earliest(self, time: int) -> int:
        found = time
        while found in self.later:
            found = self.later[found]
        while time != found:  # the next search finds its way at once
            self.later[time], time = found, self.later[time]
        return found

    def take(self, time: int) -> None:
        self.later[time] = time + 1
        self.used += 1


class Cache:
    """Lines in the order of their last use, set by set."""

    def __init__(self, size: int, ways: int) -> None:
        self.ways = ways
        self.sets: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(size // 64 // ways)]

    def holds(self, line: int) -> bool:
        """Whether the line is there; in any case it is now."""
        lines = self.sets[line % len(self.sets)]
        if line in lines:
            lines.move_to_end(line)
            return True
        lines[line] = None
        if len(lines) > self.ways:
            lines.popitem(last=False)
        return False


@dataclass(frozen=True)
class Estimate:
    """Cycles of a trace, and for each unit the cycles it could not do with less than."""

    cycles: int
    products: int
    instructions: int
    bounds: dict[str, float]

    @property
    def bottleneck(self) -> str:
        return max(self.bounds, key=lambda name: self.bounds[name])


Row = Sequence[int]
"""Address relative to the library, and the 16 general registers, before an instruction."""


class Core:
    """The core, and the state that the instructions seen so far have left."""

    def __init__(self, code: dict[int, Instruction]) -> None:
        self.code = code
        self.ports = {name: Port() for name in (*ALU, "p2", "p3", "p11", *STORE_ADDRESS, *STORE_DATA)}
        self.tiles_free = 0
        self.caches = Cache(*L1), Cache(*L2)
        self.bus = {"L2": 0.0, "L3": 0.0}
        self.ready: dict[str, int] = {}
        self.stored: dict[int, tuple[int, bool]] = {}
        self.allocating = self.allocated = self.retiring = self.retired = 0
        self.reorder: deque[int] = deque()
        self.waiting: list[int] = []
        self.counts: Counter[str] = Counter()

    def lines(self, one: Instruction, row: Row) -> list[tuple[int, int]]:
        """First and last cache line of each access."""
        assert one.address is not None
        offset, base, index, scale = one.address
        start = offset + (row[0] + one.length if base == "rip" else int(row[1 + GENERAL.index(base)]) if base else 0)
        step = int(row[1 + GENERAL.index(index)]) * scale if index else 0
        if one.moves_tile:
            step = step - (1 << 64) if step >> 63 else step
            return [((start + i * step) >> 6, (start + i * step + 63) >> 6) for i in range(ROWS)]
        start = (start + step) & ((1 << 64) - 1)
        return [(start >> 6, (start + one.size - 1) >> 6)]

    def issue(self, ports: Ports, time: int) -> int:
        """Take the port that is free first."""
        best, chosen = None, ""
        for name in ports:
            found = self.ports[name].earliest(time)
            if best is None or found < best:
                best, chosen = found, name
            if found == time:
                break
        assert best is not None
        self.ports[chosen].take(best)
        return best

    def fetched(self, one: Instruction, row: Row) -> None:
        """A prefetch into the second cache: it takes nothing of the first one and of the way there."""
        for low, _ in self.lines(one, row):
            if not self.caches[1].holds(low):
                self.counts["L2 misses"] += 1
                self.bus["L3"] += 64 / L3_BYTES_PER_CYCLE

    def missed(self, first: int, last: int, time: int) -> int:
        """Cycles more than a hit in the first cache."""
        more = 0.0
        for line in range(first, last + 1):
            if self.caches[0].holds(line):
                continue
            self.counts["L1 misses"] += 1
            self.bus["L2"] = max(self.bus["L2"], time) + 64 / L2_BYTES_PER_CYCLE
            more = max(more, L2_MORE, self.bus["L2"] - time)
            if not self.caches[1].holds(line):
                self.counts["L2 misses"] += 1
                self.bus["L3"] = max(self.bus["L3"], time) + 64 / L3_BYTES_PER_CYCLE
                more = max(more, L3_MORE, self.bus["L3"] - time)
        return -int(-more // 1)

    def allocate(self, count: int) -> int:
        """Let ``count`` micro-operations in; the cycle after the last one."""
        for _ in range(count):
            if self.allocated == ALLOCATED:
                self.allocating, self.allocated = self.allocating + 1, 0
            blocked = self.allocating
            if len(self.reorder) >= REORDER_BUFFER:
                blocked = max(blocked, self.reorder.popleft())
            while len(self.waiting) >= SCHEDULER:
                blocked = max(blocked, heapq.heappop(self.waiting))
            if blocked > self.allocating:
                self.allocating, self.allocated = blocked, 0
            self.allocated += 1
        self.counts["micro-operations"] += count
        return self.allocating + 1

    def retire(self, count: int, issued: int, done: int) -> None:
        for _ in range(count):
            heapq.heappush(self.waiting, issued)
            if done > self.retiring:
                self.retiring, self.retired = done, 0
            if self.retired == RETIRED:
                self.retiring, self.retired = self.retiring + 1, 0
            self.retired += 1
            self.reorder.append(self.retiring)

    def load(self, one: Instruction, row: Row, time: int) -> tuple[int, int]:
        """Cycle of the last access, and of the value."""
        last = done = 0
        extra = TILE_FORWARD if one.moves_tile else 0
        for low, high in self.lines(one, row):
            after = time
            for line in range(low, high + 1):
                if line in self.stored:
                    stored, by_tile = self.stored[line]
                    after = max(after, stored + (extra or (TILE_FORWARD if by_tile else FORWARD) - L1_CYCLES))
            begun = self.issue(WIDE_LOAD if one.size == 64 or one.moves_tile else LOAD, after)
            if high != low:
                self.issue(WIDE_LOAD, begun)
            last = max(last, begun)
            done = max(done, begun + self.missed(low, high, begun))
        return last, done + (one.latency - ROWS // 2 if one.moves_tile else L1_CYCLES)

    def store(self, one: Instruction, row: Row, address_ready: int, value_ready: int) -> int:
        last = 0
        for low, high in self.lines(one, row):
            self.issue(STORE_ADDRESS, address_ready)
            last = max(last, self.issue(STORE_DATA, value_ready))
            self.missed(low, high, last)
            for line in range(low, high + 1):
                self.stored[line] = last + 1, one.moves_tile
        return last

    def execute(self, row: Row) -> None:
        one = self.code[row[0]]
        count = one.micro_operations
        entered = self.allocate(count)
        ready = max([entered, *(self.ready.get(name, 0) for name in one.reads)])
        address_ready = max([entered, *(self.ready.get(name, 0) for name in one.reads if name in GENERAL)])
        issued, done = entered, ready
        if one.name in ("prefetcht1", "prefetcht2"):
            issued = done = self.issue(LOAD, address_ready)
            self.fetched(one, row)
        elif one.loads:
            issued, loaded = self.load(one, row, address_ready)
            done = max(done, loaded) if not one.moves_tile else loaded
            if one.name.startswith("prefetch"):  # is done as soon as it is on its way
                done = issued + 1
        if one.name.startswith("tdp"):
            issued = self.issue(SHUFFLE, max(done, self.tiles_free))
            self.tiles_free = issued + TDP_CYCLES
            self.counts["products"] += 1
            done = issued + one.latency
        else:
            begin = done
            for ports in one.ports:
                issued = self.issue(ports, begin)
                done = max(done, issued + one.latency)
            if not one.ports:
                done += 0 if one.moves_tile else one.latency
        if one.stores:
            issued = self.store(one, row, address_ready, done)
            done = issued + 1
        for name in one.writes:
            self.ready[name] = done
        self.retire(count, issued, done)

    def run(self, rows: Sequence[Row]) -> Estimate:
        """Execute a trace, with everything it touches brought into the caches before."""
        for row in rows:
            one = self.code[row[0]]
            if one.loads or one.stores:
                for low, high in self.lines(one, row):
                    for line in range(low, high + 1):
                        if one.name in ("prefetcht1", "prefetcht2") or not self.caches[0].holds(line):
                            self.caches[1].holds(line)
        for row in rows:
            self.execute(row)
        used = {name: port.used for name, port in self.ports.items()}
        bounds = {
            "tile products": TDP_CYCLES * self.counts["products"],
            "allocation": self.counts["micro-operations"] / ALLOCATED,
            "vector units": (used["p0"] + used["p5"]) / 2,
            "loads": (used["p2"] + used["p3"]) / 2,
            "stores": float(used["store"]),
            "L2 to L1": 64 * self.counts["L1 misses"] / L2_BYTES_PER_CYCLE,
            "L3 to L2": 64 * self.counts["L2 misses"] / L3_BYTES_PER_CYCLE,
        }
        return Estimate(self.retiring, self.counts["products"], len(rows), bounds)
