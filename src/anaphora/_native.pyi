"""The native kernels (native/). Import them through anaphora.native.load(), which knows when there are none."""

def targets() -> list[str]:
    """Instruction sets that the kernels were compiled for and this processor runs; the best last."""

def target() -> str:
    """The one in use."""

def lanes() -> int:
    """float32 values in one vector of the target in use."""

def set_target(name: str) -> None:
    """Use another one, everywhere and at once. Raises ValueError when it is not among targets()."""

def threads() -> int:
    """Threads that kernels run on, the caller's included."""

def set_threads(threads: int) -> None:
    """From the next call on. Raises ValueError below 1."""
