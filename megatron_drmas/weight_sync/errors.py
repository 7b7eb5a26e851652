"""What goes wrong in a weight update."""


class WeightSyncError(RuntimeError):
    """A weight update that did not happen as it must; names the tensor, or the rank or engine that did not do its part."""
