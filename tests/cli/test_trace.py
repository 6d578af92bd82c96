import pytest

from saccade.cli import main

NOWHERE = "http://127.0.0.1:9"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--seconds", "61"], "seconds is 61; allowed are up to 60 (--seconds)"),
        (["--url", "ftp://a"], "it must begin with http:// or https:// (--url)"),
        ([], "(--admin-api-key)"),
        (["--admin-api-key", "k\n"], "an HTTP header cannot carry (--admin-api-key)"),
        (["--admin-api-key", "k", "--url", "http://[::1"], "http://[::1 is no address of a server"),
        (["--admin-api-key", "k", "--url", "http://127.0.0.1/a b"], "a b is no address of a server"),
        (["--admin-api-key", "k", "--url", NOWHERE, "--seconds", "1"], f"{NOWHERE} cannot be reached"),
    ],
)
def test_what_prevents_a_trace_is_said(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", *flags]) == 2
    assert message in capsys.readouterr().err
