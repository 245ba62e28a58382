"""`telamon doctor`."""

from telamon.watch import doctor


def test_doctor_names_what_is_here_and_what_is_missing(telamon, monkeypatch):
    here = doctor._installed
    monkeypatch.setattr(doctor, "_installed", lambda package: None if package in ("libtpu", "jax-cuda13-plugin") else here(package))
    answer = telamon("doctor")
    assert answer.code == 0
    for part in (
        "jax",
        "8 x cpu",
        "GiB free of",
        "pip install 'telamon[tpu]'",
        "pip install 'telamon[cuda13]'",
        "pip install 'telamon[cloud]'",
    ):
        assert part in answer.out
