"""Sizes in messages and tables."""

GIB = 1 << 30


def format_bytes(count: float) -> str:
    """Format bytes in GiB or MiB."""
    return f"{count / GIB:,.1f} GiB" if count >= GIB else f"{-(-int(count) // 2**20)} MiB"
