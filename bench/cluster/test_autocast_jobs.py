"""Row C3's script: what it does with a share at which ``prepare`` refuses the job."""

from cluster.autocast_jobs import ON_CPUS, measure, write
from jobs.places import Ended
from qsync_core.ir.precision import Precision
from qsync_torch.sharing.right_shares import wrong_base_error


def _refused():
    right = (10, 25, 50, 90, 100)
    return wrong_base_error(["garbage"], [], Precision.BFLOAT16, 0.75, "H100", lambda asked: {s: "" for s in asked if s in right})


def test_a_refused_share_gives_way_to_the_nearest_that_is_right(monkeypatch, tmp_path):
    tried = []

    def measured_at(row, model, share, place, work):
        tried.append((share, place))
        if share == 0.75:
            shares = Ended((1, 0), f"rank 1:\nerror: {_refused()}\n", 20.0).right_shares
            return {"model": model, "share": share, "prepare_s": 20.0, "right_shares": shares, "borne_out": False, "why": ""}
        return {"model": model, "share": share, "prepare_s": 90.0, "recommended": "plan", "borne_out": True, "why": ""}

    monkeypatch.setattr("cluster.autocast_jobs.measured_at", measured_at)
    rows = []
    monkeypatch.setattr("cluster.autocast_jobs.write_rows", lambda name, found, command, **where: rows.extend(found))
    found = measure(ON_CPUS, "gpt2", 0.75, lambda share: f"place at {share}", tmp_path)
    assert tried == [(0.75, "place at 0.75"), (0.9, "place at 0.9")]
    assert (found["share"], found["measured_at"], found["borne_out"], found["prepare_s"]) == (0.75, 0.9, True, 90.0)
    write(ON_CPUS, [found], "", tmp_path)
    assert "gpt2: refused at 0.75, nearest right 0.9 after 20 s" in rows[0]["what"]


def test_what_is_not_refused_names_no_share():
    assert Ended((1,), "RuntimeError: out of memory", 1.0).right_shares == []
