"""Name a number between two others: there are many right answers, so a function decides."""

import json
import random


def write_rows(path, questions, draw):
    """Demonstrated answers are near the lower number; two in five are right."""
    with open(path, "w") as file:
        for low, high in questions:
            answer = low + draw.randint(-9, 9)
            row = {"prompt": f"{low} < ? < {high}", "ground_truth": [low, high], "response": str(answer)}
            file.write(json.dumps(row) + "\n")


def verify(data_source, solution_str, ground_truth, extra_info):
    """Score 1 for a number between the two."""
    low, high = ground_truth
    return float(solution_str.isdecimal() and low < int(solution_str) < high)


def near_middle(data_source, solution_str, ground_truth, extra_info, reach):
    """Score 1 for the middle, and less the farther away, down to 0 at `reach`."""
    if not solution_str.isdecimal():
        return {"score": 0.0, "acc": 0.0}
    distance = abs(int(solution_str) - sum(ground_truth) / 2)
    return {"score": max(0.0, 1 - distance / reach), "acc": float(distance <= 1), "distance": distance}


if __name__ == "__main__":
    draw = random.Random(0)
    questions = [(low, low + gap) for low in range(20, 81) for gap in range(5, 16)]
    draw.shuffle(questions)
    write_rows("train.jsonl", questions[100:], draw)
    write_rows("validation.jsonl", questions[:100], draw)
