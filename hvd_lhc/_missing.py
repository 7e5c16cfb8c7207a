"""What to say when an adapter is imported and Horovod isn't there for it."""

from __future__ import annotations

__all__ = ["missing_horovod"]


def missing_horovod(framework: str, error: ImportError) -> ImportError:
    """An ``ImportError`` that says how to get Horovod for ``framework``, in place of one that says what was not found."""
    return ImportError(
        f"hvd_lhc.{framework} needs horovod.{framework}, which can't be imported here: {error}. With {framework} installed, "
        "`python -m hvd_lhc install-horovod` builds and installs Horovod for it.",
        name=error.name,
        path=error.path,
    )
