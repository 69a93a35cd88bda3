"""Sudoku boards with one solution and 17 to 34 givens, generated in parallel and cached in a file.
The module does not import torch.
"""

from __future__ import annotations

import multiprocessing
import os
import random
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from pathlib import Path

import numpy as np

from fem_common.files import locked, make_folder

GIVENS = (17, 34)
PART = 250  # boards that one process generates in one step
# Three known boards with 17 givens (Royle's list). Removing givens one at a time almost never
# results in fewer than 21.
SEVENTEEN = (
    "000000010400000000020000000000050407008000300001090000300400200050100000000806000",
    "000000010400000000020000000000050604008000300001090000300400200050100000000807000",
    "000000012000035000000600070700000300000400800100000000000120000080000040050000600",
)


def _peers(cell: int) -> tuple[int, ...]:
    """Return the other cells of a cell's row, column and box."""
    row, column = divmod(cell, 9)
    peers = []
    for other in range(81):
        other_row, other_column = divmod(other, 9)
        same_box = (row // 3, column // 3) == (other_row // 3, other_column // 3)
        if other != cell and (row == other_row or column == other_column or same_box):
            peers.append(other)
    return tuple(peers)


PEERS = tuple(_peers(cell) for cell in range(81))

Board = list[int]
"""81 cells, row by row; 0: not given."""


def solutions(board: Board, most: int, draw: random.Random | None = None) -> list[Board]:
    """Return up to ``most`` solutions of a board; ``draw`` shuffles the order in which digits are
    tried.
    """
    can = [0b1111111110] * 81
    cells, found = list(board), list[Board]()
    for cell, digit in enumerate(board):
        if digit:
            for peer in PEERS[cell]:
                can[peer] &= ~(1 << digit)
    if any(digit and not can[cell] >> digit & 1 for cell, digit in enumerate(board)):
        return []

    def fill(empty: list[int]) -> bool:
        if not empty:
            found.append(list(cells))
            return len(found) >= most
        cell, fewest = empty[0], 10
        for each in empty:
            number = can[each].bit_count()
            if number < fewest:
                cell, fewest = each, number
                if number == 1:
                    break
        rest = [each for each in empty if each != cell]
        digits = [digit for digit in range(1, 10) if can[cell] >> digit & 1]
        if draw is not None:
            draw.shuffle(digits)
        for digit in digits:
            bit = 1 << digit
            changed = [peer for peer in PEERS[cell] if can[peer] & bit and not cells[peer]]
            cells[cell] = digit
            for peer in changed:
                can[peer] ^= bit
            if all(can[peer] for peer in changed) and fill(rest):
                return True
            for peer in changed:
                can[peer] ^= bit
            cells[cell] = 0
        return False

    fill([cell for cell in range(81) if not board[cell]])
    return found


def moved(board: Board, how: int) -> Board:
    """Return an equivalent board: digits, rows and columns are permuted and the board may be
    transposed.

    ``how`` is the random seed of the permutations, which preserve the rules.
    """
    draw = random.Random(how)
    digits = [0, *draw.sample(range(1, 10), 9)]
    rows = _permuted_lines(draw)
    columns = _permuted_lines(draw)
    turned = draw.random() < 0.5
    found = []
    for row in rows:
        for column in columns:
            cell = 9 * column + row if turned else 9 * row + column
            found.append(digits[board[cell]])
    return found


def _permuted_lines(draw: random.Random) -> list[int]:
    """Return the nine rows or columns: bands of three permuted, and the lines of each band."""
    lines = []
    for band in draw.sample(range(3), 3):
        lines += [3 * band + line for line in draw.sample(range(3), 3)]
    return lines


@cache
def _seventeen(number: int) -> tuple[Board, Board]:
    board = [int(cell) for cell in SEVENTEEN[number]]
    return board, solutions(board, 1)[0]


def made(seed: int) -> tuple[Board, Board]:
    """Return a random board and its unique solution.

    The wanted number of givens is uniformly random. The board has more if no further given can be
    removed without losing uniqueness.
    """
    draw = random.Random(seed)
    wanted = draw.randint(*GIVENS)
    if wanted < 22:
        first, solved = (list(board) for board in _seventeen(draw.randrange(len(SEVENTEEN))))
        for cell in draw.sample([cell for cell in range(81) if not first[cell]], wanted - 17):
            first[cell] = solved[cell]
        how = draw.getrandbits(64)
        return moved(first, how), moved(solved, how)
    solved = solutions([0] * 81, 1, draw)[0]
    board, left = list(solved), 81
    for cell in draw.sample(range(81), 81):
        if left == wanted:
            break
        board[cell] = 0
        if len(solutions(board, 2)) == 1:
            left -= 1
        else:
            board[cell] = solved[cell]
    return board, solved


def _part(first: int, count: int) -> list[tuple[Board, Board]]:
    return [made(seed) for seed in range(first, first + count)]


def boards(count: int, seed: int, folder: Path) -> np.ndarray:
    """Return ``count`` boards and their solutions, uint8 [count, 2, 81].

    They are read from a file in ``folder``. If it does not exist, they are generated and written to
    it; a large number of boards is generated on all cores.
    """
    file = folder / f"sudoku-{count}-{seed}.npy"
    make_folder(folder)
    with locked(folder / "lock", wait=True):
        if not file.exists():
            starts = [10_000_000 * seed + start for start in range(0, count, PART)]
            sizes = [min(PART, count - start) for start in range(0, count, PART)]
            if count > PART:
                with ProcessPoolExecutor(
                    os.cpu_count(), mp_context=multiprocessing.get_context("spawn")
                ) as pool:
                    parts = list(pool.map(_part, starts, sizes))
            else:
                parts = [_part(starts[0], count)]
            unfinished = file.with_suffix(f".{os.getpid()}.npy")
            np.save(unfinished, np.array([pair for part in parts for pair in part], dtype=np.uint8))
            unfinished.replace(file)
        full: np.ndarray = np.load(file)
    return full
