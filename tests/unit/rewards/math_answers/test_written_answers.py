"""If these fail, answers as models and data sets write them are scored wrongly."""

from __future__ import annotations

import pytest

from quintet.rewards.verifiers import math

EQUAL = [
    (r"\text{12 cm}^2", r"12\text{ cm}^2"),
    (r"\mathrm{5~cm}", "5"),
    (r"\text{\$}18", "18"),
    (r"\textdollar 18", "18"),
    (r"\mathbf{5}", "5"),
    (r"\mathbf{i}+2\mathbf{j}", r"2\mathbf{j}+\mathbf{i}"),
    (r"5 \mathrm{~m} / \mathrm{s}^{2}", r"5\text{ m/s}^2"),
    (r"30\text{ min}", "30"),
    (r"25\text{ mph}", "25 miles per hour"),
    (r"\frac{3}{4}\text{ of a mile}", r"\frac34"),
    ("5 ft 3 in", "5 feet 3 inches"),
    (r"2\text{ hours and }30\text{ minutes}", "2 hours 30 minutes"),
    (r"12:30\text{ PM}", "12:30 p.m."),
    (r"\text{June 5, 2020}", "June 5, 2020"),
    ("22 square in", r"22\text{ in}^2"),
    (r"\$247 \tfrac{2}{25}", r"247\frac{2}{25}"),
    (r"{24,163.75\mbox{ L}}", "24163.75"),
    (r"{\{-\frac72, 11\}}", r"\{11,-\frac{7}{2}\}"),
    (r"\text{18:34}", r"\frac{18}{34}"),
    (r"\angle A=3^\circ", r"3\degree"),
    (r"-40^\circ\text{F}", "-40"),
    (r"-40^\circ", "-40"),
    (r"\frac{m}{n}=\frac{3}{4}", r"\frac34"),
    (r"\text{Area} = 12\text{ cm}^2", "12"),
    ("m+n=5", "5"),
    ("f(3)=5", "5"),
    (r"f^{-1}(x)=\frac{x-1}{2}", r"\frac{x-1}{2}"),
    (r"P(X=2)=\frac12", r"\frac12"),
    ("|AB|=5", "5"),
    (r"\sin\theta=\frac12", r"\frac12"),
    (r"\frac{25\pi}{3}\approx 26.18", r"\frac{25\pi}{3}"),
    (r"x=\sqrt2\approx1.414", r"\sqrt2"),
    (r"\sqrt2\approx1.414", "1.414"),
    (r"x\approx3.14", "3.14"),
    (r"\{x \in \mathbb{R} : x \ge 0\}", r"[0,\infty)"),
    (r"\mathbf{R}", r"\mathbb{R}"),
    (r"\text{no solutions}", r"\emptyset"),
    (r"\begin{cases} x=1 \\ y=2 \end{cases}", "x=1, y=2"),
    (r"\left\{\begin{array}{l}x=1\\y=2\end{array}\right.", "x=1,y=2"),
    (r"x=\frac{\pi}{4}+k\pi, k\in\mathbb{Z}", r"\frac{\pi}{4}+k\pi,\ k \in \mathbb{Z}"),
    (r"\textbf{(A)}\ 5", "A"),
    (r"\textbf{(A)}\ 5", "5"),
    (r"\text{(B) } 12", r"\textbf{(B)}\ 12"),
    (r"(D)\ 12", "D"),
]
DIFFERENT = [
    (r"\textbf{(A)}\ 5", "B"),
    (r"\textbf{(A)}\ 5", "6"),
    (r"\textbf{(A)}\ 5", r"\textbf{(B)}\ 5"),
    (r"\textbf{(A)}\ 5", r"\textbf{(A)}\ 6"),
    (r"5\text{ June}", "5"),
    (r"2\text{ hours and }30\text{ minutes}", "2"),
    (r"2\text{ h }30\text{ min}", "2"),
    (r"5 \text{ ft } 3\text{ in}", "5"),
    (r"3\text{ apples and }2\text{ pears}", "3"),
    ("5'", "5"),
    ("5''", "5'"),
    ("f'(x)=2x", "f(x)=2x"),
    ("x'", "x"),
    (r"\ge 5", "5"),
    (r"\ne 5", "5"),
    (r"\sim 5", "5"),
    (r"5\ldots", "5"),
    (r"3.14\ldots", "3.14"),
    (r"5\text{ or more}", "5"),
    (r"5\text{ at least}", "5"),
    (r"5\text{k}", "5"),
    (r"1\text{st}", r"1\text{ nd}"),
    ("ABC", "ACB"),
    (r"\{\{1\},\{2\}\}", r"\{1,2\}"),
    (r"\{\emptyset\}", r"\emptyset"),
    (r"x\in\{(1,2)\}", r"x=1"),
    (r"-40^\circ", r"40^\circ"),
    (r"5\text{ ft }3\text{ in}", "5,3"),
    (r"\text{Area}=5", r"\text{Perimeter}=5"),
    ("f(3)=5", "f(4)=5"),
    (r"\sqrt2\approx5", "5"),
    ("x+y=5", "x+y=6"),
    ("x^2=4", "4"),
    ("2x=10", "10"),
    (r"\mathbb{Z}", r"\mathbb{N}"),
]


@pytest.mark.parametrize(("answer", "truth"), EQUAL)
def test_equal_answers_are_right_in_both_directions(answer: str, truth: str) -> None:
    assert math.verify_boxed(f"\\boxed{{{answer}}}", truth, {}).score == 1.0
    assert math.verify_boxed(f"\\boxed{{{truth}}}", answer, {}).score == 1.0


@pytest.mark.parametrize(("answer", "truth"), DIFFERENT)
def test_different_answers_are_wrong_in_both_directions(answer: str, truth: str) -> None:
    assert math.verify_boxed(f"\\boxed{{{answer}}}", truth, {}).score == 0.0
    assert math.verify_boxed(f"\\boxed{{{truth}}}", answer, {}).score == 0.0
