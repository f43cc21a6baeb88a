"""Where data lie: one face for files of this machine, object stores, web servers and fsspec's file systems.

A reader asks a `Storage` for names and for bytes, and knows no protocol:

    storage = Storage({"endpoint": "https://…"})      # pickles small: the options alone
    storage.listing("s3://bucket/train")              # yields Object(name, size, tag), at any depth
    storage.look("s3://bucket/a.tar")                 # Object of one name; None where there is none
    storage.read(one, start, length)                  # bytes, of the object that was listed and of no other
    storage.read_many([(one, start, length), …])      # yields bytes in this order, many requests under way
    storage.put("s3://bucket/a.tar.idx", data)        # whole or not at all
    with storage.apart() as apart:                    # the same face; the requests are another process' own

`s3://`, `gs://`, `az://`, `http://` and `https://` go by obstore, paths (and `file://`) by the operating
system, all other protocols by fsspec. What always holds:

- A read is of the object that was listed: its size and tag (a digest of its ETag; of a file the time that it
  was written to) are compared with what answered. Another one, or none, is `SourceChanged`.
- A network that fails, a server that is busy (its SlowDown makes all requests of the process pause) and an
  answer that is cut short are tried again, with jitter, until `patience_s`; then they are
  `SourceUnavailable`. No record is ever to blame. An answer that is slow, and that is waited for, is asked
  for once more; of all requests few are.
- obstore's threads do not survive a fork: a child that was forked after them would wait for ever. A reader
  looks at data that lie elsewhere `apart` while it is made, in a process that ends with it, so that its
  loader workers may be forked. A child of a process that had read all the same reads through a process of
  its own.
- Credentials stay with the drivers. They are in no name, message or argument list: a URL with a password or a
  signature is refused.

`storage.py` is the face, `drivers.py` has a class for each way to data, `listing.py` what lies below a
folder, `kept.py` keeps that under a prefix, `requests.py` tries again and keeps many requests under way,
`apart.py` is the other process, `object_file.py` an object as a file.
None of them knows what is in an object.
"""

from edl_torch.readers.storage.drivers import Data, Object, is_loop, storage_error
from edl_torch.readers.storage.names import is_elsewhere, is_url, is_web, local_path
from edl_torch.readers.storage.object_file import ObjectFile, Piece
from edl_torch.readers.storage.storage import Ranges, Storage, StorageOptions

__all__ = [
    "Data",
    "Object",
    "ObjectFile",
    "Piece",
    "Ranges",
    "Storage",
    "StorageOptions",
    "is_elsewhere",
    "is_loop",
    "is_url",
    "is_web",
    "local_path",
    "storage_error",
]
