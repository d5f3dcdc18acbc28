"""What can stop the load generator itself. How a single request failed is not here: that is a record's `error`."""


class LoadgenError(Exception):
    """Root of the tree; the command line prints it without a traceback and exits with 2."""


class SettingsError(LoadgenError):
    """A setting is unknown, of the wrong type, or contradicts another. One line per problem, each naming the key."""


class TargetError(LoadgenError):
    """A target does not answer as needed before any load was sent (wrong address, unknown model, no vectors)."""


class WorkerError(LoadgenError):
    """A worker process died or reported an exception: its share of the load is missing, so there is no result."""
