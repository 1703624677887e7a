# SPDX-License-Identifier: Apache-2.0
"""The arithmetic of the kernel benchmark on invented times: who is the fastest, by how much, what is not counted."""

from __future__ import annotations

import math
import re
import sys
import time
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[1]
if not (ROOT / "benchmarks").is_dir():
    pytest.skip("an sdist holds the tests, but not the benchmarks", allow_module_level=True)
sys.path.insert(0, str(ROOT))

from benchmarks import cpu_use, ratios  # noqa: E402
from benchmarks.peers import data  # noqa: E402
from benchmarks.peers.base import AWQ_ORDER, Peer, Refused, pack_columns, pack_pairs  # noqa: E402
from benchmarks.peers.environments import ENVIRONMENTS, missing  # noqa: E402
from benchmarks.peers.registry import BY_NAME, CONTENDERS, LEFT_OUT, comparisons  # noqa: E402
from benchmarks.plan import FULL, QUICK, Section  # noqa: E402

# ---- ratios ----


def test_the_fastest_peer_is_picked_where_its_ratio_is_not_taken() -> None:
    # "lucky" is fast in the picking rounds (1, 3, 5) only: had it been picked on the others, "steady" would win.
    times = {"ours": [1.0] * 6, "lucky": [9.0, 1.0, 9.0, 1.0, 9.0, 1.0], "steady": [2.0] * 6}
    found = ratios.compare(times, "ours", ["lucky", "steady"], range(6))
    assert found == ratios.Comparison("lucky", (9.0, 9.0, 9.0))
    assert found.ratio == 9.0


def test_picking_and_measuring_rounds_are_apart_and_all_there() -> None:
    for count in range(2, 12):
        picking, measuring = ratios.halves(range(count))
        assert not set(picking) & set(measuring)
        assert sorted(picking + measuring) == list(range(count))
    with pytest.raises(ValueError, match="cannot be halved"):
        ratios.halves([3])


def test_equal_noisy_peers_give_no_advantage_to_the_picked_one() -> None:
    random = np.random.default_rng(3)
    logs, naive = [], []
    for _ in range(300):
        noise = {str(peer): (1 + 0.1 * random.random(12)).tolist() for peer in range(15)}
        times = noise | {"ours": (1 + 0.1 * random.random(12)).tolist()}
        found = ratios.compare(times, "ours", list(noise), range(12))
        assert found is not None
        logs.append(math.log(found.ratio))
        best = min(np.median(values) for values in noise.values())
        naive.append(math.log(best / np.median(times["ours"])))
    assert abs(np.mean(logs)) < 0.005
    assert np.mean(naive) < -0.015  # what taking the least median would claim


def test_rounds_without_a_time_are_passed_over() -> None:
    times = {"ours": [1.0] * 4, "slow": [5.0, 5.0, None, None], "never": [None] * 4}
    found = ratios.compare(times, "ours", ["slow", "never", "not measured"], range(4))
    assert found == ratios.Comparison("slow", (5.0,))
    assert ratios.compare(times, "ours", ["never"], range(4)) is None
    assert ratios.compare(times, "absent", ["slow"], range(4)) is None


def test_rounds_above_the_limit_do_not_count() -> None:
    assert ratios.quiet_rounds([0.0, 0.2, 0.05, 0.051], 0.05) == [0, 2]


def test_the_mean_over_shapes_is_geometric() -> None:
    assert ratios.geometric_mean([0.5, 2.0]) == pytest.approx(1.0)
    assert math.isnan(ratios.geometric_mean([]))
    interval = ratios.bootstrap([[0.5] * 5, [2.0] * 5])
    assert (interval.estimate, interval.low, interval.high) == pytest.approx((1.0, 1.0, 1.0))


def test_the_interval_holds_the_estimate_and_widens_with_noise() -> None:
    calm = ratios.bootstrap([[1.0, 1.01, 0.99, 1.0, 1.02]])
    wild = ratios.bootstrap([[1.0, 1.5, 0.7, 1.2, 0.8]])
    for one in (calm, wild):
        assert one.low <= one.estimate <= one.high
    assert wild.high - wild.low > 10 * (calm.high - calm.low)
    assert ratios.bootstrap([[1.0, 1.5, 0.7, 1.2, 0.8]]) == wild  # the draws are the same each time
    for empty in ([], [[1.0], []]):
        with pytest.raises(ValueError, match="ratios"):
            ratios.bootstrap(empty)


def test_the_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    random = np.random.default_rng(11)
    covered = 0
    for trial in range(60):
        cells = [np.exp(0.05 * random.standard_normal(9)).tolist() for _ in range(6)]
        interval = ratios.bootstrap(cells, seed=trial)
        covered += interval.low <= 1.0 <= interval.high
    assert 45 <= covered <= 60  # 54 expected, 2.3 the standard deviation


def test_the_interval_holds_the_share_of_means_that_it_says() -> None:
    cells = [np.exp(0.05 * np.random.default_rng(seed).standard_normal(41)).tolist() for seed in range(6)]
    wide, narrow = (ratios.bootstrap(cells, level=level) for level in (0.9, 0.5))
    # Of a normal distribution 90 % lie within 1.645 standard deviations, half within 0.674.
    assert (wide.high - wide.low) / (narrow.high - narrow.low) == pytest.approx(1.645 / 0.674, rel=0.15)


def test_a_cliff_is_fewer_rows_that_take_longer() -> None:
    assert ratios.cliffs({1: 1.0, 2: 1.5, 4: 2.0}, 0.0) == []
    assert ratios.cliffs({5: 3.0, 8: 2.0, 12: 2.5}, 0.03) == [(5, 8)]
    assert ratios.cliffs({1: 1.02, 2: 1.0}, 0.03) == []


# ---- what others took of the machine ----

STAT = """cpu  300 0 100 1000 50 5 5 40 7 0
cpu0 100 0 50 500 25 5 0 20 7 0
cpu1 200 0 50 500 25 0 5 20 0 0
intr 12345
"""


def test_busy_ticks_are_all_but_idle_and_waiting_for_disks() -> None:
    assert cpu_use.busy_ticks(STAT) == {0: 175, 1: 275}


def test_a_process_with_any_name_is_read() -> None:
    assert cpu_use.process_ticks("7 (a b) c) S 1 2 3 4 5 6 7 8 9 10 11 22 0 0 20") == 33


def test_the_foreign_share_is_what_own_processes_did_not_take() -> None:
    assert cpu_use.foreign_share(busy=3.0, own=2.0, wall=2.0, cpus=2) == pytest.approx(0.25)
    assert cpu_use.foreign_share(busy=1.99, own=2.0, wall=1.0, cpus=2) == 0.0


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="/proc/stat is Linux's")
def test_own_work_is_not_foreign() -> None:
    before = cpu_use.read([])
    start = time.process_time()
    while (own := time.process_time() - start) < 0.2:
        sum(range(1000))
    after = cpu_use.read([])
    assert before is not None and after is not None
    assert after.own - before.own == pytest.approx(own, abs=0.05)  # counted in ticks of 10 ms
    assert after.busy - before.busy >= 0.1


# ---- the data and its packings ----


def test_a_column_pack_holds_what_the_order_says() -> None:
    values = np.arange(16, dtype=np.uint8).reshape(1, 16)
    words = pack_columns(values, AWQ_ORDER).view(np.uint32)
    for column in range(16):
        nibble = AWQ_ORDER.index(column % 8)
        assert words[0, column // 8] >> (4 * nibble) & 15 == column
    with pytest.raises(Refused, match="multiple of 8"):
        pack_columns(np.zeros((1, 12), np.uint8))
    assert pack_pairs(np.array([1, 2, 3, 4], np.uint8)).tolist() == [0x21, 0x43]


def test_weights_are_the_same_each_time_and_every_dtype_holds_their_scales() -> None:
    one, two = (data.make_weights(64, 24, 32, zero_points=True) for _ in range(2))
    assert all((getattr(one, part) == getattr(two, part)).all() for part in ("q", "scales", "zeros"))
    assert (one.scales.astype(np.float16) == one.scales).all()
    assert (data.to_bf16(one.scales) == one.scales).all()
    assert len(np.unique(one.zeros)) > 3
    assert (data.make_weights(64, 24, 32, zero_points=False).zeros == 8).all()
    k, n = 40, 5
    assert one.float64(np.array([n]))[k, 0] == (int(one.q[k, n]) - int(one.zeros[1, n])) * float(one.scales[1, n])
    assert (one.float32() == one.float64(np.arange(24))).all()
    with pytest.raises(ValueError, match="does not divide"):
        data.make_weights(65, 24, 32, zero_points=True)


def test_activations_are_exact_in_their_dtype_and_outliers_are_few_and_large() -> None:
    import torch

    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        x = torch.from_numpy(data.make_x(3, 512, name, outliers=True))
        assert torch.equal(x.to(dtype).float(), x)
    plain, outliers = (data.make_x(4, 1024, "fp32", outliers=one) for one in (False, True))
    changed = (plain != outliers).any(axis=0)
    assert changed.sum() == 1024 // data.OUTLIER_EVERY
    assert np.allclose(outliers[:, changed], plain[:, changed] * data.OUTLIER_FACTOR)


def test_both_ends_are_checked_and_nan_is_an_error() -> None:
    assert data.ends(5, 3).tolist() == [0, 1, 2, 3, 4]
    assert data.ends(10, 2).tolist() == [0, 1, 8, 9]
    reference = np.ones((2, 2))
    assert data.relative_error(np.ones((2, 2)), reference) == 0
    assert math.isnan(data.relative_error(np.array([[1, np.nan], [1, 1]]), reference))


def test_a_peer_gets_the_dtype_it_takes() -> None:
    class Wide(Peer):
        takes = ("fp32",)

    assert (Wide.dtype_for("bf16"), Peer.dtype_for("bf16")) == ("fp32", "bf16")
    with pytest.raises(Refused, match="takes x in bf16, not fp16"):
        Peer.dtype_for("fp16")


# ---- the table of contenders and the plan ----


def test_every_contender_has_an_adapter_an_environment_and_a_name_of_its_own() -> None:
    assert len(BY_NAME) == len(CONTENDERS)
    assert not BY_NAME.keys() & LEFT_OUT.keys()
    for one in CONTENDERS:
        adapter = one.load()
        assert issubclass(adapter, Peer)
        assert adapter.zero_points == one.zero_points
        assert (adapter.arithmetic_for("bf16") == "int8") == (one.bits == 8)
        assert one.environment in ENVIRONMENTS


def test_comparisons_hold_no_contender_of_our_own_and_only_what_they_say() -> None:
    every, with_zeros = comparisons(8)["every peer"], comparisons(8)["peers with zero points"]
    (sixteen,) = comparisons(16).values()
    assert set(with_zeros) < set(every)
    assert not any(BY_NAME[name].ours for name in every)
    assert {name for name in every if not BY_NAME[name].zero_points} == set(every) - set(with_zeros)
    assert sixteen and all(BY_NAME[name].bits == 16 for name in sixteen)


def test_environments_are_pinned_and_name_no_host() -> None:
    assert {path.stem for path in (ROOT / "benchmarks/peers/locks").glob("*.txt")} == set(ENVIRONMENTS)
    for environment in ENVIRONMENTS.values():
        for line in environment.lock.read_text(encoding="utf-8").splitlines():
            assert re.fullmatch(r"[\w.-]+==[\w.]+", line), line
        assert set(environment.from_source) <= environment.pins().keys()
        assert "numpy" in environment.pins()


def test_an_environment_that_is_not_set_up_names_the_command(tmp_path: Path) -> None:
    environment = ENVIRONMENTS["ggml"]
    assert "python -m benchmarks.peers setup ggml" in (missing(environment, tmp_path) or "")
    environment.python(tmp_path).parent.mkdir(parents=True)
    environment.python(tmp_path).touch()
    assert missing(environment, tmp_path) is not None  # an installation that was cut short
    (tmp_path / "ggml" / "ready").touch()
    assert missing(environment, tmp_path) is None


def test_the_plan_has_every_case_and_enough_rounds() -> None:
    peers = [section for section in FULL if section.name == "peers"]
    assert all(section.rounds >= 9 for section in (*peers, *QUICK))
    assert {section.group for section in peers} == {128, 64, 32}
    assert {section.dtype for section in peers} == {"bf16", "fp16", "fp32"}
    assert {1, 2, 4, 5, 8, 12, 16, 32, 64, 128, 256, 1024} == set(peers[0].batches)
    with pytest.raises(ValueError, match=r"Section\.name"):
        Section("other", 128, "bf16", (), (), 9, 0.1)
