"""The one exception that is the contract's own."""


class Unsupported(Exception):
    """What a port, a target or a machine cannot do; its text is the reason, fit to be printed in a table's cell."""
