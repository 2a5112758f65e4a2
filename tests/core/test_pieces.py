"""The same pieces, results and order on every engine, also when workers are killed in the middle."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch

from sortrl.core.errors import MissingDependency, SortRLError
from sortrl.core.pieces import Here, Piece, run_pieces
from sortrl.core.workers import Processes, Ray, _ray, cores

SEEDS = range(8)


def sums(seed):
    """Something whose last bits depend on the order of additions, and so on the number of threads."""
    values = torch.randn(200_000, generator=torch.Generator().manual_seed(seed))
    return {"seed": seed, "sum": float(values.sum()), "first": float(values[0])}


def collected(work, pieces, engine):
    found = {}

    def done(piece, result):
        assert piece.name not in found, "handed over once"
        found[piece.name] = result

    run_pieces(work, pieces, done, engine)
    return found


def dying_once(folder, number, fatal):
    """``sums``, but the worker that is first to compute piece ``number`` kills itself by ``fatal`` in the middle of it."""

    def work(seed):
        mark = folder / f"tried-{seed}"
        if seed == number and not mark.exists():
            mark.write_text(str(os.getpid()))
            os.kill(os.getpid(), fatal)
            time.sleep(60)
        values = torch.randn(200_000, generator=torch.Generator().manual_seed(seed))
        return {"seed": seed, "sum": float(values.sum()), "first": float(values[0])}

    return work


PIECES = [Piece(f"seed {seed}", seed) for seed in SEEDS]


@pytest.fixture(scope="module")
def alone():
    """What this process computes by itself."""
    return collected(sums, PIECES, Here(threads=1))


def test_processes_give_the_bits_of_one_process_although_one_is_killed(alone, tmp_path, capfd):
    found = collected(dying_once(tmp_path, 3, signal.SIGKILL), PIECES, Processes(2))
    assert found == alone
    assert int((tmp_path / "tried-3").read_text()) != os.getpid()
    assert "Pieces: done" in capfd.readouterr().err


def test_a_piece_that_always_kills_its_worker_ends_the_work_and_keeps_the_rest(tmp_path):
    def work(seed):
        if seed == 1:
            with (tmp_path / "tries").open("a") as tries:
                tries.write("x")
            os._exit(7)
        return seed

    found = {}
    with pytest.raises(SortRLError, match="seed 1: its worker was lost 3 times, the last time: exit code 7"):
        run_pieces(work, PIECES[:3], lambda piece, result: found.update({piece.name: result}), Processes(2))
    assert (tmp_path / "tries").read_text() == "xxx"
    assert found["seed 0"] == 0


@pytest.mark.parametrize("engine", [Here(), Processes(2)], ids=["here", "processes"])
def test_an_error_of_a_piece_is_raised_when_what_runs_beside_it_is_kept(engine, tmp_path):
    def work(seed):
        if seed == 0:
            raise SortRLError("seed 0 is not a seed")
        time.sleep(0.5)
        return seed

    found = {}
    with pytest.raises(SortRLError, match="seed 0 is not a seed"):
        run_pieces(work, PIECES, lambda piece, result: found.update({piece.name: result}), engine)
    assert set(found) <= {"seed 1"}, "begun before the error was known, and finished; no other was begun"


def test_pieces_wait_for_those_they_come_after():
    order = []
    pieces = [
        Piece("suite", 1, after=("curve",)),
        Piece("curve", 2),
        Piece("picture", 3, after=("suite", "done long ago")),
    ]
    run_pieces(order.append, pieces, lambda *_: None)
    assert order == [2, 1, 3]
    with pytest.raises(SortRLError, match="2 pieces wait for each other"):
        run_pieces(order.append, [Piece("a", 1, after=("b",)), Piece("b", 2, after=("a",))], lambda *_: None)
    with pytest.raises(SortRLError, match="Two pieces of work have the name 'a'"):
        run_pieces(order.append, [Piece("a", 1), Piece("a", 2)], lambda *_: None)


def test_workers_have_one_thread_tell_what_they_print_and_end_with_the_work(capfd):
    def work(seed):
        print(f"piece {seed} begins")
        return torch.get_num_threads(), os.getpid()

    found = collected(work, PIECES[:4], Processes(1))
    assert {threads for threads, _ in found.values()} == {1}
    (pid,) = {pid for _, pid in found.values()}
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    said = [line for line in capfd.readouterr().err.splitlines() if line.startswith("piece")]
    assert said == [f"piece {seed} begins" for seed in range(4)], (
        "each on a line of its own, beside those of the progress"
    )


def test_a_module_that_workers_cannot_import_is_named():
    with pytest.raises(SortRLError, match="Cannot import the module 'no_such_module' for --import"):
        collected(sums, PIECES, Processes(1, imports="no_such_module"))


def test_bad_numbers_are_named():
    assert cores() >= 1
    for workers in (0, 5000):
        with pytest.raises(SortRLError, match=rf"--workers is {workers}, expected 1\.\.1024"):
            Processes(workers)


def test_without_ray_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    with pytest.raises(MissingDependency, match=r"pip install 'sortrl\[ray\]'"):
        collected(sums, PIECES, Ray())


@pytest.fixture(scope="module")
def cluster():
    """A real cluster: two machines' worth of Ray processes, of one core each, on this one."""
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'sortrl[ray]'")
    _ray()  # with its settings
    import ray
    from ray.cluster_utils import Cluster

    size = {"num_cpus": 1, "object_store_memory": 80 * 2**20}
    made = Cluster(initialize_head=True, head_node_args=size)
    try:
        made.add_node(**size)
        made.wait_for_nodes()
        ray.init(address=made.address, logging_level="error", log_to_driver=False)
        yield made
    finally:
        ray.shutdown()
        made.shutdown()


def test_a_cluster_gives_the_bits_of_one_process_although_a_worker_and_a_machine_are_lost(cluster, alone, tmp_path):
    """One worker kills itself; then the second machine goes down while it computes. Every result arrives once, bit for bit."""
    import ray

    assert sum(node["Alive"] for node in ray.nodes()) == 2
    found = collected(dying_once(tmp_path, 3, signal.SIGKILL), PIECES, Ray())
    assert found == alone
    assert (tmp_path / "tried-3").exists()

    head = cluster.head_node.node_id
    folder = Path(tmp_path) / "nodes"
    folder.mkdir()

    def work(seed):
        import ray

        node = ray.get_runtime_context().get_node_id()
        if node != head:
            (folder / f"{seed}").write_text(node)
            time.sleep(120)  # longer than the machine has
        values = torch.randn(200_000, generator=torch.Generator().manual_seed(seed))
        return {"seed": seed, "sum": float(values.sum()), "first": float(values[0])}

    def cut():
        while not any(folder.iterdir()):
            time.sleep(0.05)
        (second,) = cluster.worker_nodes
        cluster.remove_node(second, allow_graceful=False)

    cutter = threading.Thread(target=cut, daemon=True)
    cutter.start()
    found = collected(work, PIECES, Ray())
    cutter.join()
    assert found == alone
    assert not cluster.worker_nodes
    assert list(folder.iterdir()), "the machine that was lost had begun a piece"
