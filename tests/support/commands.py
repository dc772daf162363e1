"""The command line in this process, and what it leaves in a folder."""

from ecckpt import cli


def run(capsys, *arguments):
    """Exit status, output and errors of ``ecckpt`` with these arguments."""
    status = cli.main([str(each) for each in arguments])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def leftovers(folder):
    return sorted(path.name for path in folder.iterdir())
