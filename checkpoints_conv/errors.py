"""The one exception of this package."""


class ConversionError(Exception):
    """A checkpoint that cannot be converted exactly; the message names the tensor, key or file and what would do."""
