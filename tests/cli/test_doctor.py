"""`telamon doctor`."""


def test_doctor_names_what_is_here_and_what_is_missing(telamon):
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
