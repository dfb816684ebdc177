"""What a run will do, computed without loading a model.

`run_plan` puts everything together: numbers of episodes and updates (`batch_arithmetic`), devices (`placement`), memory
(`memory`) and warnings about valid but unwise settings (`advice`). `step_time` estimates times for `config/fit/`.
"""
