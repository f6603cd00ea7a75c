"""Declarations of the methods that td-distributed provides."""
# The bodies are empty, since td-distributed implements the methods.
# mypy: disable-error-code="empty-body"

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any

from ..typing import DeviceType
from .declarations import provided_by, takes

if TYPE_CHECKING:
    from pathlib import Path

    from torch.distributed import ProcessGroup, Work
    from typing_extensions import Self

__all__ = ["ConsolidateOptions", "DistributedMethods"]


@dataclass(frozen=True)
class ConsolidateOptions:
    """Options of :meth:`DistributedMethods.consolidate`, which describes them."""

    filename: Path | str | None = None
    _: KW_ONLY
    num_threads: int = 0
    device: DeviceType | None = None
    non_blocking: bool = False
    inplace: bool = False
    return_early: bool = False
    use_buffer: bool = False
    share_memory: bool = False
    pin_memory: bool = False
    metadata: bool = False
    durable: bool = False
    checksums: bool = False


class DistributedMethods:
    """The methods that send, receive, reduce and consolidate collections."""

    __slots__ = ()

    @provided_by("td-distributed")
    @takes(ConsolidateOptions)
    def consolidate(self, options: ConsolidateOptions) -> Self:
        """Copy the collection into one storage: return a locked collection whose leaves are views of that storage.

        A collection that is already consolidated is returned itself if all options have their defaults.

        Args:
            filename: also write the storage and the structure to a file, and memory-map the result on it.
            num_threads: number of threads that copy; 0 copies in the calling thread.
            device: device of the storage; by default that of the leaves, if they share one, else the CPU.
            non_blocking: as in :meth:`torch.Tensor.to`.
            inplace: put the views into this collection, lock it and return it.
            return_early: consolidate in a background thread and return a :class:`TensorDictFuture` of the result. Do
                not write to leaves before it is done nor, with ``inplace``, change entries.
            use_buffer: with ``filename``, gather in memory first, write once, and keep the result in memory.
            share_memory: put the storage in shared memory.
            pin_memory: put the storage in page-locked memory.
            metadata: append the structure to the storage in memory, in the format of the file, so that the storage alone
                can be sent; :func:`from_buffer` reads it.
            durable: with ``filename``, sync the file and its directory, so that a power loss leaves either the old file
                or the new one.
            checksums: with ``filename``, record a hash of the storage, which ``from_consolidated(verify=True)`` and
                :func:`td_core.verify` compare. The structure has a checksum in every file.

        Raises:
            ValueError: ``durable`` or ``checksums`` without ``filename``.
            StructureError: a leaf cannot be stored as bytes (sparse, strided nested, quantized, on the meta device), or
                ``filename`` is given and ``device`` is the meta device; nothing was written.
            LockedError: with ``inplace``, this collection or one in it is locked; nothing was changed.
            CodecError: with ``filename`` or ``metadata``, no registered serializer can store a value; the message names
                its key.

        >>> td = consolidate(TensorDict({"a": torch.ones(2), "n": {"b": torch.zeros(3)}}))
        >>> td["a"].untyped_storage().data_ptr() == td["n", "b"].untyped_storage().data_ptr()
        True
        """

    @provided_by("td-distributed")
    def is_consolidated(self) -> bool:
        """Return True if all leaves are still views of the storage that consolidation made.

        >>> td = TensorDict({"a": 1})
        >>> is_consolidated(td), is_consolidated(consolidate(td))
        (False, True)
        """

    @provided_by("td-distributed")
    @classmethod
    def from_consolidated(cls, filename: str | Path, *, verify: bool = False) -> Self:
        """Load a collection from a consolidated file, written by td or by any release of tensordict.

        The leaves are views of a private memory map of the file: writing them does not change the file.

        Args:
            filename: the file.
            verify: compare the storage with its recorded hash first, if the file was written with ``checksums=True``.

        Raises:
            FormatError: the file is damaged.
            FileNotFoundError: the file does not exist.

        >>> _ = consolidate(TensorDict({"a": torch.arange(3)}), "td.bin")
        >>> from_consolidated("td.bin")["a"]
        tensor([0, 1, 2])
        """

    @provided_by("td-distributed")
    def send(
        self,
        dst: int | Any | None = None,
        *,
        group: ProcessGroup | None = None,
        group_dst: int | None = None,
        init_tag: int = 0,
        pseudo_rand: bool = False,
        consolidated: bool = False,
        wire: str = "td",
    ) -> None:
        """Send this collection to a process that calls :meth:`recv`.

        For a memory-mapped collection below the receiver's ``root``, only the path of its files is sent.

        Args:
            dst: rank of the receiver in the global group.
            group: the process group; None is the global one.
            group_dst: rank of the receiver in ``group``, instead of ``dst``.
            init_tag: tag of the first message; each following message has the next tag.
            pseudo_rand: draw the tags from a generator seeded with ``init_tag`` instead.
            consolidated: send one payload message for all leaves.
            wire: ``"td"`` sends the structure first, so that a receiver with another structure raises. ``"reference"`` is
                the protocol of tensordict: the peer may use that library, and a mismatch hangs or is not detected. On
                this wire the storage of a consolidated collection is sent without checking each leaf, unless its number
                of references changed, as after ``leaf.data = ...``. Changes that keep this number are not detected:
                ``leaf.t_()``, swapping the ``data`` of leaves, ``leaf.data = ...`` while the old ``data`` is referenced.

        Raises:
            StructureError: a leaf cannot be sent (sparse, strided nested); nothing was sent.
            CodecError: no registered serializer can store a value; the message names its key; nothing was sent.

        >>> TensorDict({"a": torch.ones(3)}).send(dst=1)  # doctest: +SKIP
        """

    @provided_by("td-distributed")
    def recv(
        self,
        src: int | Any | None = None,
        *,
        group: ProcessGroup | None = None,
        group_src: int | None = None,
        init_tag: int = 0,
        pseudo_rand: bool = False,
        consolidated: bool = False,
        wire: str = "td",
        root: str | Path | None = None,
    ) -> int:
        """Receive a collection that a process sent with :meth:`send`, into this collection in place.

        All messages are received into a buffer first, so a peer that dies leaves the collection unchanged. A consolidated
        collection keeps a buffer of up to 64 MiB for the next message.

        Args:
            src: rank of the sender in the global group.
            group: the process group; None is the global one.
            group_src: rank of the sender in ``group``, instead of ``src``.
            init_tag: tag of the first message, the same as for the sender.
            pseudo_rand: the same as for the sender.
            consolidated: the same as for the sender; needed with ``wire="reference"`` only.
            wire: the same as for the sender; with ``"reference"``, :meth:`send` lists the changes that are not detected.
            root: folder that both processes can read. The sender of a memory-mapped collection below it sends the path
                instead of the bytes, and this process reads the files.

        Returns:
            The last tag.

        Raises:
            StructureError: the structure of the message differs, or leaves that are tied here have different elements in
                the message; the message of the error names the first key. The collection is unchanged, and the message
                was received completely, so the next ``recv`` works.
            FormatError: the received bytes are not a message of :meth:`send`, or a path is outside of ``root``.
            MissingPluginError: the message contains a path, and td-memmap is not installed.

        >>> TensorDict({"a": torch.zeros(3)}).recv(src=0)  # doctest: +SKIP
        0
        """

    @provided_by("td-distributed")
    def isend(
        self,
        dst: int | None = None,
        *,
        group: ProcessGroup | None = None,
        group_dst: int | None = None,
        init_tag: int = 0,
        pseudo_rand: bool = False,
        return_early: bool = False,
        consolidated: bool = False,
        wire: str = "td",
    ) -> int | list[Work] | None:
        """Start to send this collection; arguments as for :meth:`send`.

        With ``return_early``, return a list of handles with ``wait()``; otherwise wait and return the last tag. A background
        thread waits for handles that are dropped. A memory-mapped collection is sent as bytes, not as a path.
        """

    @provided_by("td-distributed")
    def irecv(
        self,
        src: int | None = None,
        *,
        group: ProcessGroup | None = None,
        group_src: int | None = None,
        return_premature: bool = False,
        init_tag: int = 0,
        pseudo_rand: bool = False,
        consolidated: bool = False,
        wire: str = "td",
        root: str | Path | None = None,
    ) -> tuple[int, list[Any]] | list[Any] | None:
        """Start to receive into this collection; arguments as for :meth:`recv`.

        With ``return_premature``, return a list with one handle. The messages arrive in the background; ``is_completed()``
        returns True once they have, and ``wait()`` writes them. Do not change the structure of the collection before that.
        If the handle is dropped, the received data is discarded. Otherwise receive before returning.
        """

    @provided_by("td-distributed")
    def init_remote(
        self,
        dst: int | None = None,
        group: ProcessGroup | None = None,
        device: DeviceType | None = None,
        use_broadcast: bool = False,
    ) -> None:
        """Send structure and content to a process that calls :func:`from_remote_init`.

        For a memory-mapped collection below the receiver's ``root``, only the path of its files is sent.

        Args:
            dst: rank of the receiver in the global group; with ``use_broadcast`` any of the receivers, or None.
            group: the process group; None is the global one.
            device: move the collection to this device before sending.
            use_broadcast: send to all other ranks of the group, which all call :func:`from_remote_init`.

        Raises:
            StructureError: a leaf cannot be sent, or the receiver refused the size.
            ValueError: ``dst`` is not a rank of the group.

        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> TensorDict({"a": torch.arange(3)}).init_remote(use_broadcast=True)  # to no other rank
        >>> dist.destroy_process_group()
        """

    @provided_by("td-distributed")
    @classmethod
    def from_remote_init(
        cls,
        src: int,
        group: ProcessGroup | None = None,
        device: DeviceType | None = None,
        use_broadcast: bool = False,
        limit: int = 1 << 36,
        *,
        root: str | Path | None = None,
    ) -> Self:
        """Receive the collection that the rank ``src`` sends with :func:`init_remote`, and return it.

        Nothing is unpickled or imported: only classes that this process has defined are used.

        Args:
            src: rank of the sender in the global group.
            group: the process group; None is the global one.
            device: device of the result; by default the one that the backend uses for messages.
            use_broadcast: the same as for the sender.
            limit: largest accepted size in bytes; if it is exceeded, the sender raises too.
            root: folder that both processes can read. The sender of a memory-mapped collection below it sends the path
                instead of the bytes; the result maps the files privately, so writing it does not change them. It cannot
                be combined with ``use_broadcast``.

        Raises:
            FormatError: the announced size exceeds ``limit``, the message is damaged, or a path is outside of ``root``.
            StructureError: the sender could not send the collection.
            MissingPluginError: the message contains a path, and td-memmap is not installed.

        >>> from_remote_init(src=0)["a"]  # doctest: +SKIP
        tensor([0, 1, 2])
        """

    @provided_by("td-distributed")
    def broadcast(
        self, src: int, *, group: ProcessGroup | None = None, device: DeviceType | None = None
    ) -> Self:
        """Broadcast the collection of the rank ``src`` and return it on every rank.

        Args:
            src: rank in the global group.
            group: the process group; None is the global one.
            device: device of the result on the other ranks; by default the one that the backend uses for messages.

        Raises:
            StructureError: the collection cannot be sent; raised on every rank.
            CodecError: no registered serializer can store a value; raised on the rank ``src``, StructureError on the others.

        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> TensorDict({"a": torch.arange(3)}).broadcast(0)["a"]
        tensor([0, 1, 2])
        >>> dist.destroy_process_group()
        """

    @provided_by("td-distributed")
    def scatter(
        self,
        src: int,
        tensordicts: list[Any] | None = None,
        *,
        group: ProcessGroup | None = None,
        device: DeviceType | None = None,
    ) -> Self:
        """Scatter the list of collections of the rank ``src``: return the item of this rank.

        Args:
            src: rank in the global group.
            tensordicts: on the rank ``src`` one collection per rank of the group, in the order of the ranks.
            group: the process group; None is the global one.
            device: device of the result; by default the one that the backend uses for messages.

        Raises:
            StructureError: an item cannot be sent; raised on every rank.
            ValueError: the list does not have one item per rank; raised on the rank ``src``, StructureError on the others.

        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> TensorDict().scatter(0, [TensorDict({"a": torch.arange(3)})])["a"]
        tensor([0, 1, 2])
        >>> dist.destroy_process_group()
        """

    @provided_by("td-distributed")
    def gather_and_stack(self, dst: int, group: ProcessGroup | None = None) -> Self | None:
        """Stack the collections of all other ranks into the collection of the rank ``dst``, in place.

        On the rank ``dst`` the first dim of this collection has one position per other rank; missing entries are added.
        The items may have different structures if this collection is a lazy stack.

        Args:
            dst: rank in the global group.
            group: the process group; None is the global one.

        Returns:
            This collection on the rank ``dst``, None elsewhere.

        Raises:
            StructureError: a collection cannot be sent (raised on every rank), or those that arrive do not fit (raised on the
                rank ``dst``, where nothing was changed).
            BatchSizeError: the first dim does not have one position per other rank; raised on the rank ``dst``, where
                nothing was changed.

        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> room = TensorDict({"a": torch.zeros(0, 3)}, batch_size=[0])  # for no other rank
        >>> room.gather_and_stack(0) is room
        True
        >>> dist.destroy_process_group()
        """

    @provided_by("td-distributed")
    def all_gather(self, *, group: ProcessGroup | None = None) -> list[Any]:
        """Gather the collections of all ranks. Return them as a list in the order of the ranks, on every rank.

        Args:
            group: the process group; None is the global one.

        Raises:
            StructureError: a collection cannot be sent; raised on every rank.
            CodecError: no registered serializer can store a value; raised on its rank, StructureError on the others.

        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> [item["a"] for item in TensorDict({"a": torch.arange(3)}).all_gather()]
        [tensor([0, 1, 2])]
        >>> dist.destroy_process_group()
        """

    @provided_by("td-distributed")
    def all_reduce(
        self,
        op: object = None,
        *,
        group: ProcessGroup | None = None,
        async_op: bool = False,
        bucket_bytes: int | None = None,
    ) -> Any:
        """Reduce every leaf over all ranks, in place; non-tensor data is not changed.

        Args:
            op: a ``torch.distributed.ReduceOp``; a sum by default.
            group: the process group; None is the global one.
            async_op: return a list of handles to ``wait()`` on.
            bucket_bytes: largest size in bytes of a bucket of leaves below 1 MiB; 32 MiB by default.

        Raises:
            StructureError: the structures of the ranks differ, or a leaf cannot be reduced; raised on every rank, and
                nothing was changed.
            FormatError: the ranks make different calls, or pass different arguments; raised on every rank.

        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> td = TensorDict({"a": torch.arange(3)})
        >>> td.all_reduce()  # of one rank
        >>> td["a"]
        tensor([0, 1, 2])
        >>> dist.destroy_process_group()
        """

    @provided_by("td-distributed")
    def reduce(
        self,
        dst: int,
        op: Any = None,
        async_op: bool = False,
        return_premature: bool = False,
        group: ProcessGroup | None = None,
        *,
        bucket_bytes: int | None = None,
    ) -> Any:
        """Reduce every leaf over all ranks into the collection of the rank ``dst``, in place; other ranks keep theirs.

        Args:
            dst: rank in the global group.
            op: a ``torch.distributed.ReduceOp``; a sum by default.
            async_op: start all buckets before waiting for the first.
            return_premature: with ``async_op``, return a list of handles to ``wait()`` on instead of waiting.
            group: the process group; None is the global one.
            bucket_bytes: largest size in bytes of a bucket of leaves below 1 MiB; 32 MiB by default.

        Raises:
            StructureError, FormatError: as for :func:`all_reduce`.

        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> td = TensorDict({"a": torch.arange(3)})
        >>> td.reduce(0, dist.ReduceOp.MAX)
        >>> td["a"]
        tensor([0, 1, 2])
        >>> dist.destroy_process_group()
        """
