"""Search for settings with which a run fits into given devices, for `quintet plan --fit`.

`proposals` combines and ranks the `variants` of learners and engines by the arithmetic of `config/plan/`, and reads the
best ones back as `overrides` in the format of the user.
"""
