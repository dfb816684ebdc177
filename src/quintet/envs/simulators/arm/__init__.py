"""Light simulator: an arm with two joints on MuJoCo that reaches balls and pushes a puck."""
