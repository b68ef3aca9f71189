"""What can go wrong, told in one line: what happened, where, what was expected, what to do."""


class HvdkitError(Exception):
    """Base of every error that hvdkit tells its user; its text is the whole message.

    `exit_status` is what a command ends with: 1 where a run failed, 2 where the request was wrong.
    """

    exit_status = 1


class RequestError(HvdkitError):
    """The request was wrong: a bad recipe, option, host string or file. Nothing was started or written.

    Several faults found at once are told at once, one a line.
    """

    exit_status = 2


class RunError(HvdkitError):
    """Something that was rightly asked for failed while it ran."""


class Stopped(HvdkitError):
    """Training ended before its last step because it was asked to, and nothing is lost."""

    exit_status = 0
