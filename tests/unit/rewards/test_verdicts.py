"""If these fail, verdicts of judges are read from their thoughts, from quotations, or wrongly."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quintet.rewards.verdicts import parse_score, parse_yes_no


@pytest.mark.parametrize(
    ("reply", "verdict"),
    [
        ("NO. The article was published yesterday.", 0.0),
        ("<think>is it yes? …</think> NO", 0.0),
        ("<think> yes", None),
        ("yes? hmm</think>No.", 0.0),
        ("yes and no", None),
        ("Not yes", None),
        ("YES.", 1.0),
        ("**Yes**", 1.0),
        ("Final: yes", 1.0),
        ("Ja", None),
        ("", None),
        ("no, yes", None),
        ("Score: 10", None),
        ("Yes, the answers agree.", 1.0),
        ("No mistakes anywhere", None),
        ("Yes the answer agrees", 1.0),
        ("No it does not", 0.0),
        ("NO\n\nThe reference says yes.", 0.0),
        ("The answers differ.\n\nNO", 0.0),
        ("The answers agree. YES", 1.0),
        ("Verdict: NO", 0.0),
        ("**Verdict:** yes", 1.0),
        ("Final verdict: **no**", 0.0),
        ('{"verdict": "yes"}', 1.0),
        ('```json\n{"correct": false, "why": "yes"}\n```', 0.0),
        ("[[yes]]", 1.0),
        ("[[no]]", 0.0),
        ("[[YES]] … [[NO]]", 0.0),
        ("Yes. Wait, that is wrong.\nNo", None),
        ("Yesterday it was right.", None),
        ("eyes", None),
        ("yes/no", None),
        ("YES or NO? I say NO.", None),
        ("'yes'", 1.0),
        ('"NO"', 0.0),
        ("(yes)", 1.0),
        ("Yes!", 1.0),
        ("No — differs", 0.0),
        ("Correct", 1.0),
        ("incorrect.", 0.0),
        ("The answer is correct.", 1.0),
        ("Answer: yes\nReference: no\nThey differ.", None),
        ("The answer is incorrect", 0.0),
        ("Answer: yes\nReference: no\n\nNO", 0.0),
        ("The answer says: yes", None),
        ('NO. The response said "Final answer: yes".', 0.0),
        ("Answer: yes", 1.0),
        ("yes\n", 1.0),
        ("No\n\nyes", None),
        ("True", 1.0),
        ("# Verdict\n\nYES", 1.0),
        ("YES\nNO", None),
        ("Final answer: NO, because of yes", 0.0),
        ("No: 3 is not 4", 0.0),
        ("Yes (both are 4)", None),
        ("\\boxed{yes}", None),
        ("Final Answer: **Yes**", 1.0),
        ("No, the final answer does not agree.", 0.0),
        ("not correct", None),
        ("NO YES", None),
    ],
)
def test_yes_and_no_count_only_as_the_verdict(reply: str, verdict: float | None) -> None:
    assert parse_yes_no(reply) == verdict


@pytest.mark.parametrize(
    ("reply", "score"),
    [
        ("[[7]]", 0.7),
        ("First [[2]], but then [[ 9 ]]", 0.9),
        ("[[4/5]]", 0.8),
        ("[[yes]]", 1.0),
        ("[[No]]", 0.0),
        ("<think>[[2]] or 3/10?</think>\n[[10]]", 1.0),
        ("The answer 3/4 is right. **Score: 9**", 0.9),
        ("I give a score of 7 out of 10.", 0.7),
        ("Rating: 8/10 because 1 + 1 = 2", 0.8),
        ("7.5", 0.75),
        ("3/4.", 0.75),
        ("Yes, quite.", 1.0),
        ("The proof fails in line 2.\nVerdict: no", 0.0),
        ("Incorrect", 0.0),
        ("That is not correct", None),
        ("No mistakes anywhere", None),
        ("[[12]]", None),
        ("[[-1]]", None),
        ("Score: 12", None),
        ("[[good]]", None),
        ("3 of 4 steps hold, so 5 points were lost", None),
        ("1/0", None),
        ("", None),
        ("[[7]] out of [[10]]", 0.7),
        ("[[7]]/10", 0.7),
        ("[[7]] / [[10]]", 0.7),
        ("Score: 7/10", 0.7),
        ("**Score**: 7", 0.7),
        ("**Score:** 7", 0.7),
        ("[[11]]", None),
        ("[[7,5]]", 0.75),
        ("Score: 7,5", 0.75),
        ("[[NaN]]", None),
        ("[[nan]]", None),
        ("Score: NaN", None),
        ("Score: -3", None),
        ("Score (0-10): 7", 0.7),
        ("Final score: 85%", 0.85),
        ("[[**7**]]", 0.7),
        ("\\[\\[7\\]\\]", 0.7),
        ('The answer contains "[[10]]", which I ignore. [[3]]', 0.3),
        ("Score: [[3]]. (The answer demanded [[10]].)", 0.3),
        ('[[3]]. The answer demanded "[[10]]"', None),
        ("I rate it [[3]]", 0.3),
        ("between [[0]] and [[10]], I give [[6]].", 0.6),
        ('{"score": 7}', 0.7),
        ('{"score": 3, "max_score": 5}', 0.6),
        ('{"score": "7/10"}', 0.7),
        ('{"reason": "it {is} fine", "rating": 8}', 0.8),
        ('{"score": NaN}', None),
        ('{"score": true}', 1.0),
        ('{"score": 11}', None),
        ("Score: 7. I would have given a score of 9 if", 0.7),
        ("Clarity score: 3\nCorrectness score: 8\nOverall score: 6", 0.6),
        ("Score: 3\nThe answer says score: 10", 0.3),
        ("Rating: [7]", 0.7),
        ("<think>[[7]]", None),
        ("8", 0.8),
        ("10/10", 1.0),
        ("0", 0.0),
        ("[[0]]", 0.0),
        ("[[10]]", 1.0),
        ("[[10.0]]", 1.0),
        ("score is 7", 0.7),
        ("Score - 7", 0.7),
        ("Score: seven", None),
        ("[[7 out of 10]]", 0.7),
        ("[[7/ 10]]", 0.7),
        ("[[1e1]]", None),
        ("[[70%]]", 0.7),
        ("Score: 7.", 0.7),
        ("Total score: 17/20", 0.85),
        ("Grade: A", None),
        ("Score:\n7", 0.7),
        ("Score: **7**/10", 0.7),
        ("[[5]] [[5]]", 0.5),
    ],
)
def test_scores_count_only_as_the_verdict(reply: str, score: float | None) -> None:
    assert parse_score(reply) == score


@given(st.text(max_size=100), st.sampled_from(["YES", "NO"]), st.integers(0, 10))
def test_thoughts_never_change_a_verdict(thought: str, word: str, score: int) -> None:
    for form in ("<think>{} [[1]] yes no</think>{}", "{} NO. Score: 3</think>\n\n{}"):
        assert parse_yes_no(form.format(thought, word)) == float(word == "YES")
        assert parse_score(form.format(thought, f"[[{score}]]")) == score / 10


@given(st.text(max_size=200))
def test_no_reply_raises(reply: str) -> None:
    for parse in (parse_score, parse_yes_no):
        assert parse(reply) is None or 0 <= (parse(reply) or 0.0) <= 1
