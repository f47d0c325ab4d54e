"""Data sets that need no download: written once, below a directory that processes share."""

import contextlib
import io
import os
import shutil
import tempfile
from pathlib import Path

import tensorflow_datasets as tfds


def prepared(
    builder: type[tfds.core.GeneratorBasedBuilder], data_dir: str
) -> tfds.core.DatasetBuilder:
    """Writes a data set below a directory, once, and returns its builder.

    Any number of processes may call this together: each one that finds nothing prepares its own
    copy beside the final place and renames it there in one step; the first rename wins.

    Args:
      builder: the class of the data set.
      data_dir: root of prepared data sets, as `tfds.data_source` takes it.

    Returns:
      A builder whose data are on disk.
    """
    final = Path(data_dir).expanduser() / builder.name / str(builder.VERSION)
    if not final.is_dir():
        final.parent.mkdir(parents=True, exist_ok=True)
        scratch = tempfile.mkdtemp(prefix=".preparing-", dir=final.parent)
        try:
            made = builder(data_dir=scratch, file_format="array_record")
            tfds.disable_progress_bar()
            with contextlib.redirect_stdout(io.StringIO()):  # It would report a download.
                made.download_and_prepare()
            os.rename(made.data_dir, final)
        except OSError:
            if not final.is_dir():  # Otherwise another process was first, and its copy is as good.
                raise
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return tfds.builder_from_directory(str(final))
