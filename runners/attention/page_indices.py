"""Packed page lists for FlashInfer, made on the device from the page table: the host reads nothing back.

FlashInfer reads a batch's pages as one packed list with offsets. One kernel writes the list, the
offsets and the last-page lengths from the static inputs. It runs at the start of each forward pass and
is captured with it, so every replay sees the page table as it is then, without a launch or a copy of
its own on the host side.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class PageIndices:
    """Device buffers that the kernels of a step read, for up to `max_batch_size` requests.

    One set serves every capture size and every attention group: steps run in order on one stream.
    """

    #: `[max_batch_size + 1]` int32: request `i` owns `indices[indptr[i] : indptr[i + 1]]`.
    indptr: torch.Tensor
    #: `[max_batch_size * max_pages]` int32, page numbers.
    indices: torch.Tensor
    #: `[max_batch_size]` int32, tokens in each request's last page, 1 to `page_size`.
    last_page_len: torch.Tensor

    @classmethod
    def allocate(cls, max_batch_size: int, max_pages: int, device: torch.device) -> PageIndices:
        def zeros(length: int) -> torch.Tensor:
            return torch.zeros(length, dtype=torch.int32, device=device)

        return cls(zeros(max_batch_size + 1), zeros(max_batch_size * max_pages), zeros(max_batch_size))

    @property
    def max_batch_size(self) -> int:
        return self.last_page_len.shape[0]

    @property
    def num_bytes(self) -> int:
        return self.indptr.nbytes + self.indices.nbytes + self.last_page_len.nbytes


def write_page_indices(
    out: PageIndices,
    page_table: torch.Tensor,
    rows: torch.Tensor,
    seq_lens: torch.Tensor,
    page_size: int,
    slots: torch.Tensor | None = None,
) -> None:
    """Write the page lists of a batch into the first entries of `out`.

    Args:
        out: where to write.
        page_table: `[num_rows, max_pages]` int32, row-major.
        rows: `[batch_size]` int32, the row of each request.
        seq_lens: `[batch_size]` int32, at least 1 and at most `max_pages * page_size`.
        page_size: tokens a page.
        slots: `[batch_size]` int64, of a decode step the slot of each newest token: it says which page is a
            request's last one, unless that is the null page. So the table may lack the pages that the step opens.

    On CUDA one kernel, queued on the current stream; elsewhere the torch twin.
    """
    if page_table.device.type == "cuda":
        from runners.attention.triton_kernels import launch_page_indices

        launch_page_indices(out, page_table, rows, seq_lens, page_size, slots)
    else:
        write_page_indices_torch(out, page_table, rows, seq_lens, page_size, slots)


def write_page_indices_torch(
    out: PageIndices,
    page_table: torch.Tensor,
    rows: torch.Tensor,
    seq_lens: torch.Tensor,
    page_size: int,
    slots: torch.Tensor | None = None,
) -> None:
    """The plain twin of the kernel. Reads sizes on the host, so not for a captured step."""
    batch_size = seq_lens.shape[0]
    counts = (seq_lens + page_size - 1) // page_size
    out.indptr[0] = 0
    out.indptr[1 : batch_size + 1] = counts.cumsum(0)
    out.last_page_len[:batch_size] = seq_lens - (counts - 1) * page_size
    owned = torch.arange(page_table.shape[1], device=page_table.device) < counts.unsqueeze(1)
    pages = page_table[rows.long()][owned]
    out.indices[: pages.shape[0]] = pages
    if slots is not None:
        newest = (slots // page_size).to(torch.int32)
        last = out.indptr[1 : batch_size + 1].long() - 1
        out.indices[last] = torch.where(newest > 0, newest, out.indices[last])
