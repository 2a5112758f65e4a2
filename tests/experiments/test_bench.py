"""The benchmarks' machinery: fair rivals, a strict schema, honest notes. Nothing here asserts on time."""

from __future__ import annotations

import copy
import json
import math
import time

import numpy as np
import pytest
import torch

from sortrl.attacks import PGD
from sortrl.core.errors import SortRLError
from sortrl.distill import PRESETS
from sortrl.experiments import bench
from sortrl.experiments.bench import games
from sortrl.experiments.bench.attacked import AttackedPlay
from sortrl.experiments.bench.images import AttackedScreens, EveryPixel, ImageSize, ImageStep, student
from sortrl.experiments.bench.operators import Limits
from sortrl.experiments.bench.policies import MEASURED, Size, Step, make_policy, schedule_shares
from sortrl.experiments.bench.rivals import CdistPolicy, broadcast_bounds, broadcast_lp, by_sort, by_topk, masked_cdist
from sortrl.experiments.bench.timing import Contender, disagreements, take_turns
from sortrl.nets import SortPolicy, truncated_mix
from sortrl.ops import reference


@pytest.fixture(scope="module")
def results():
    lines = []
    found = bench.run(quick=True, progress=lines.append)
    assert len(lines) >= len(found["cases"])
    return found


@pytest.mark.parametrize("p", [8.0, math.inf])
@pytest.mark.parametrize("batch", [512, 300, 5])
def test_the_cdist_policy_computes_our_scores_and_gradients(p, batch):
    size = Size(width=64, depth=4, batch=batch)
    policy = make_policy(size)
    ours, rival = Step(copy.deepcopy(policy), p, size), Step(CdistPolicy(copy.deepcopy(policy)), p, size)
    for step in (ours, rival):
        step.restore()
    scores = ours()
    assert scores.std() > 0
    torch.testing.assert_close(rival(), scores, atol=1e-3, rtol=1e-3)
    for (name, a), b in zip(ours.policy.named_parameters(), rival.policy.parameters(), strict=True):
        torch.testing.assert_close(b.grad, a.grad, atol=1e-3, rtol=1e-3, msg=name)


def test_the_masks_are_in_use_when_policies_are_compared():
    policy = make_policy(Size(64, 4, 512))
    masked = [CdistPolicy(policy).training_scores(torch.ones(512, 8), torch.Generator().manual_seed(s)) for s in (0, 1)]
    assert (masked[0] - masked[1]).abs().max() > 1e-3


@pytest.mark.parametrize("p", [8.0, math.inf])
def test_masked_cdist_is_the_reference(p):
    generator = torch.Generator().manual_seed(0)
    x, w = torch.randn(10, 17, generator=generator), torch.randn(6, 17, generator=generator)
    in_keep, out_keep = torch.rand(3, 17, generator=generator) > 0.4, torch.rand(3, 6, generator=generator) > 0.4
    expected = reference.max_dist if math.isinf(p) else lambda *a: reference.lp_dist(*a[:2], p, *a[2:])
    for masks in ((in_keep, out_keep), (in_keep, None), (None, out_keep), (None, None)):
        torch.testing.assert_close(masked_cdist(x, w, p, *masks), expected(x, w, *masks), atol=1e-4, rtol=1e-4)


def test_the_other_rivals_are_the_reference():
    generator = torch.Generator().manual_seed(0)
    x, w, mix = torch.randn(5, 17, generator=generator), torch.randn(3, 17, generator=generator), truncated_mix(0.3, 17)
    for p in (8.0, 1024.0):
        torch.testing.assert_close(broadcast_lp(x, w, p), reference.lp_dist(x, w, p))
    lo, hi = x - 0.1, x + 0.1
    torch.testing.assert_close(broadcast_bounds(lo, hi, w), torch.cat(reference.max_bounds(lo, hi, w), 1))
    for rival in (by_sort, by_topk):
        torch.testing.assert_close(rival(x, w, mix), reference.sort_dist(x, w, mix))


def test_results_have_the_schema_and_survive_strict_json(results, tmp_path):
    bench.write(results, tmp_path / "bench.json")
    read = json.loads((tmp_path / "bench.json").read_text(), parse_constant=lambda name: pytest.fail(f"{name} in JSON"))
    assert read == results
    assert set(read) == {"machine", "config", "limits", "cases", "scaling", "memory"}
    assert {"cpu", "cores", "isa", "threads", "torch", "python", "sortrl"} <= set(read["machine"])
    assert {"repeats", "slow_repeats", "seed"} <= set(read["config"])
    whole = {
        "train_step",
        "policy_infer",
        "attacked_play",
        "policy_infer_images",
        "distill",
        "attacked_images",
        "ri_fgsm_multi",
    }
    wholes = {"train_step_images", "train_step_printed"}  # held against the arithmetic of their layers
    wanted = {"max_forward", "max_bounds", "sort_forward", "lp_forward", "lp_train", "sort_grad_x", *whole, *wholes}
    assert {case["op"] for case in read["cases"]} == wanted
    compiled = {"max_forward", "max_bounds", "lp_forward", "lp_train"}  # torch.compile is not run in quick mode
    for case in read["cases"]:
        assert {"op", "shape", "p", "ours_s", "rivals", "limit_s", "wrong", "notes"} <= set(case)
        assert len(case["shape"]) == 3
        assert 0 < case["ours_s"] <= case["median_s"]
        assert case["rivals"] or case["op"] == "distill"
        assert (case["limit_s"] is None) == (case["op"] in whole or case["p"] == 1024)
        for name, seconds in case["rivals"].items():
            missing = (case["op"] in compiled and name == "compile") or case["op"] == "train_step_printed"
            assert (seconds is None) == missing
            explained = any(f"{name}: " in note for note in case["notes"])
            assert explained == (seconds is None or name in case["wrong"])
    assert read["memory"]["bound_bytes"] == 3 * (read["memory"]["parameter_bytes"] + read["memory"]["activation_bytes"])
    assert (
        read["scaling"]["policy"]["depth"]["shapes"][-1][2] == 16 * read["scaling"]["policy"]["depth"]["shapes"][0][2]
    )
    for axes in read["scaling"].values():
        for line in axes.values():
            assert len(line["seconds"]) == len(line["shapes"]) == len(line["seconds_per_element"])


def test_decisions_have_percentiles_alone_and_under_load(results):
    for case in results["cases"]:
        if not case["op"].startswith("policy_infer") or case["shape"][0] != 1:
            continue
        for latency in (case["latency_s"], case["latency_under_load_s"]):
            in_order = [latency[name] for name in ("best", "p50", "p90", "p99", "p99.9", "worst")]
            assert in_order == sorted(in_order)
            assert in_order[0] > 0


def test_the_share_of_kernels_in_a_distillation(results):
    (case,) = [case for case in results["cases"] if case["op"] == "distill"]
    assert 0 < case["kernel_share"] < 1
    parts = {name: seconds for name, seconds in case["parts_s"].items() if name != "whole"}
    assert {"lp_forward", "lp_backward", "max_forward", "max_backward"} <= set(parts)
    assert case["kernel_share"] == pytest.approx(sum(parts.values()) / case["parts_s"]["whole"])


def test_the_rival_of_a_student_of_images_computes_its_scores():
    size = ImageSize(side=12, width=16, batch=40)
    ours, rival = (ImageStep(student(size), 8.0, 40, cdist=cdist) for cdist in (False, True))
    torch.testing.assert_close(rival(), ours(), atol=1e-3, rtol=1e-3)


def test_an_attack_on_every_pixel_and_one_on_those_that_count_break_the_same_states():
    size = ImageSize(side=28, width=16)
    attacks = [AttackedScreens(student(size, kind), PGD(10), 6, size.side) for kind in (SortPolicy, EveryPixel)]
    assert attacks[0].policy.near(attacks[0].unit - 0.01, attacks[0].unit + 0.01) is not None
    actions = [attack.policy.scores(attack()).argmax(1) for attack in attacks]
    assert torch.equal(*actions)


def test_the_figure_shows_every_processor(results, tmp_path):
    bench.draw({"here": results, "there": {k: v for k, v in results.items() if k != "limits"}}, tmp_path / "bench.png")
    assert (tmp_path / "bench.png").stat().st_size > 10_000


def test_attacked_play_is_real_play_and_counts_steps(results):
    (case,) = [case for case in results["cases"] if case["op"] == "attacked_play"]
    assert case["steps_per_s"]["ours"] == pytest.approx(case["shape"][0] / case["ours_s"])
    size = Size(width=24, depth=3, batch=4)
    play = AttackedPlay(make_policy(size, inputs=4, actions=2).requires_grad_(False), 4, "auto")
    play.restore()
    first = [obs.copy() for obs in play.obs]
    for _ in range(30):  # longer than an untrained policy balances: episodes end and begin anew
        before = np.stack(play.obs)
        shown = play()
        assert 0 < (shown.numpy() - before).max() <= 0.1 + 1e-6
        assert all(play.envs.info.obs_shape == obs.shape for obs in play.obs)
    assert any((a != b).any() for a, b in zip(first, play.obs, strict=True))
    play.envs.close()


def test_the_table_has_a_row_per_case(results):
    rows = bench.table(results).splitlines()[2:]
    assert [row.split(" | ")[0].strip("| ") for row in rows] == [case["op"] for case in results["cases"]]
    assert all("x " in row for row in rows)


def test_wrong_and_failing_rivals_are_reported():
    def fail() -> torch.Tensor:
        raise RuntimeError("no compiler\nmore")

    calls = {"double": Contender(lambda: torch.full((2,), 2.0)), "broken": Contender(fail)}
    timing = take_turns(Contender(lambda: torch.ones(2)), calls, 2)
    assert timing.best_s["broken"] is None
    assert timing.notes == ["broken failed: RuntimeError: no compiler"]
    assert disagreements(timing.first)["double"].startswith("100.00% of its result differs")
    overflown = {"ours": torch.ones(2), "cdist": torch.tensor([1.0, math.inf])}
    assert disagreements(overflown)["cdist"].startswith("50% of its result is not finite")


def test_a_rival_that_breaks_a_tie_the_other_way_is_not_wrong():
    ours = torch.ones(100_000)
    tied, broken = ours.clone(), ours.clone()
    tied[:5] = 2.0
    broken[:500] = 2.0
    assert list(disagreements({"ours": ours, "tied": tied, "broken": broken})) == ["broken"]


def test_a_beaten_limit_is_reported_not_hidden():
    limits = Limits()
    limits.rate[0] = 1.0
    row = {"shape": [1, 2, 3], "ours_s": 5.0, "limit_s": None, "notes": []}
    limits.apply(row, 0)
    assert row["limit_s"] == 6.0
    assert "faster than the limit" in row["notes"][0]


def test_an_endless_rival_is_timed_once(monkeypatch):
    for name in ("SLOW_S", "ENDLESS_S"):
        monkeypatch.setattr(f"sortrl.experiments.bench.timing.{name}", 0.3)
    calls = []

    def endless() -> torch.Tensor:
        calls.append(time.sleep(0.5))
        return torch.ones(1)

    timing = take_turns(Contender(lambda: torch.ones(1)), {"endless": Contender(endless)}, 6)
    assert len(calls) == 1
    assert timing.best_s["endless"] >= 0.5


def test_our_own_failures_are_not_swallowed():
    def fail() -> torch.Tensor:
        raise RuntimeError("ours")

    with pytest.raises(RuntimeError, match="ours"):
        take_turns(Contender(fail), {}, 2)


def test_the_shares_cover_the_schedule():
    shares = schedule_shares(PRESETS["paper"])
    assert tuple(shares) == MEASURED
    assert sum(shares.values()) == pytest.approx(1.0)
    assert shares[math.inf] == pytest.approx(PRESETS["paper"].final_share, abs=0.01)


def test_too_few_repeats_are_refused():
    with pytest.raises(SortRLError, match="at least 5"):
        bench.run(quick=True, repeats=1)


@pytest.mark.slow
def test_games_are_played_alike_in_one_process_and_in_two():
    pytest.importorskip("ale_py")
    row = games.random_play(3, processes=2, repeats=5)
    assert row["wrong"] == []
    assert min(row["steps_per_s"].values()) > 0


@pytest.mark.slow
def test_trainings_learn_alike_in_one_process_and_in_two():
    pytest.importorskip("ale_py")
    row = games.teach_step(4, processes=2, repeats=5)
    assert row["wrong"] == []
    assert set(row["steps_per_s"]) == {"ours", "one process", "one process, float32"}
    assert min(row["steps_per_s"].values()) > 0
