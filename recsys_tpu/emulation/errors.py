"""What goes wrong when an emulated device is asked for."""


class EmulationError(RuntimeError):
    """The `tpu` device cannot be emulated in this process; the message says what to do."""
