"""What may be the beginning of a marker is held back, and nothing else."""

import random

import pytest

from saccade.inputs.text.markers import split_undecided


@pytest.mark.parametrize(
    ("text", "markers", "blanks", "held"),
    [
        ("a <tool", ["<tool_call>"], None, " <tool"),
        ("a <tool", ["<tool_call>"], "", "<tool"),
        ("a \n\n", ["</think>"], "\n", "\n\n"),
        ("a \n\n<", ["</think>"], "\n", "\n\n<"),
        ("a <t>", ["<tool_call>"], None, ""),
        ("xab", ["abc", "b!"], "", "ab"),
        ("aaa", ["aab"], "", "aa"),
        ("stop", ["top!", "opposite"], "", "top"),
        ("   ", ["x"], None, "   "),
        ("   ", [], "", ""),
        ("", ["x"], "", ""),
    ],
)
def test_the_longest_possible_beginning_is_held_back(
    text: str, markers: list[str], blanks: str | None, held: str
) -> None:
    assert split_undecided(text, markers, blanks) == (text[: len(text) - len(held)], held)


def test_what_is_given_out_can_never_become_a_marker_and_what_is_held_back_still_can() -> None:
    """By trying: random texts of three letters, against every place where a marker could begin."""
    rng = random.Random()
    for _ in range(2000):
        markers = ["".join(rng.choices("abc", k=rng.randint(1, 5))) for _ in range(rng.randint(1, 3))]
        text = "".join(rng.choices("abc", k=rng.randint(0, 8)))
        if any(marker in text for marker in markers):
            continue
        certain, held = split_undecided(text, markers)
        begins = [at for at in range(len(text)) if any(marker.startswith(text[at:]) for marker in markers)]
        assert certain + held == text
        assert len(certain) == min(begins, default=len(text)), (text, markers)
