"""What a verb of `gangline` imports, and whoever reads what runs leave behind.

Torch is loaded with the first name that needs it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gangline.plugin.lazy import lazily

if TYPE_CHECKING:
    from gangline.cli import notes_by as notes_by
    from gangline.cli.verbs import usage_of as usage_of, verb_of as verb_of
    from gangline.config.values import override as override
    from gangline.errors import printable as printable
    from gangline.interop import load_pretrained as load_pretrained
    from gangline.interop.commands import (
        add_output as add_output,
        train_command as train_command,
        words_for as words_for,
        write_model as write_model,
    )
    from gangline.interop.names import Theirs as Theirs, theirs_of as theirs_of
    from gangline.interop.tensors import tensor_names as tensor_names
    from gangline.interop.tokenizer_files import file_beside as file_beside, tokenizer_files as tokenizer_files
    from gangline.record import every_record as every_record, plain as plain, read_records as read_records
    from gangline.run import attempts as attempts
    from gangline.run.attempts import Attempt as Attempt
    from gangline.run.directory import (
        RunDirectory as RunDirectory,
        part_versions as part_versions,
        write_whole as write_whole,
    )
    from gangline.run.ending import (
        RunEnding as RunEnding,
        clear_ending as clear_ending,
        read_ending as read_ending,
        write_ending as write_ending,
    )
    from gangline.run.events import Events as Events, read_events as read_events
    from gangline.run_files import open_own as open_own, open_regular as open_regular, read_regular as read_regular
    from gangline.sampling.options import Sampling as Sampling, Written as Written
    from gangline.sampling.sampler import Sampler as Sampler, Text as Text, Writer as Writer, sample as sample

__getattr__, __all__ = lazily(
    __name__,
    {
        "gangline.run.directory": "RunDirectory part_versions write_whole",
        "gangline.run_files": "open_own open_regular read_regular",
        "gangline.run": "attempts",
        "gangline.cli": "notes_by",
        "gangline.cli.verbs": "usage_of verb_of",
        "gangline.record": "every_record plain read_records",
        "gangline.run.ending": "RunEnding clear_ending read_ending write_ending",
        "gangline.config.values": "override",
        "gangline.errors": "printable",
        "gangline.run.events": "Events read_events",
        "gangline.sampling.options": "Sampling Written",
        "gangline.sampling.sampler": "Sampler Text Writer sample",
        "gangline.interop": "load_pretrained",
        "gangline.interop.commands": "add_output train_command words_for write_model",
        "gangline.interop.names": "Theirs theirs_of",
        "gangline.interop.tensors": "tensor_names",
        "gangline.interop.tokenizer_files": "file_beside tokenizer_files",
        "gangline.run.attempts": "Attempt",
    },
)
