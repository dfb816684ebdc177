"""Composing foreign files as their own users do, by Hydra's library."""
