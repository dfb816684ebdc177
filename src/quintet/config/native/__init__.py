"""Native configuration schema: frozen sections, with every field documented in place.

A value that is invalid on its own is refused here; checks across keys are in `quintet.config.plan` and
`quintet.config.checks`. Fields with unsupported values are marked with `Requires`. Nothing here imports torch.
"""
