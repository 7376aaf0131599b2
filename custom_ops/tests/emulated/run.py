"""Runs a static program for Linux on AArch64 on any machine: Unicorn emulates the processor, this script Linux.

python custom_ops/tests/emulated/run.py PROGRAM [ARGUMENT …]

The program has its memory, its standard output and no files. A system call that is not emulated ends it with an error.
"""

from __future__ import annotations

import os
import struct
import sys
from pathlib import Path

import unicorn
from unicorn import arm64_const as arm64

PAGE = 0x1000
STACK, STACK_SIZE = 0x7F_0000_0000, 16 << 20
HEAP, HEAP_SIZE = 0x10_0000_0000, 1 << 30
X = [arm64.UC_ARM64_REG_X0 + i for i in range(9)]
ENOMEM, ENOTTY = -12, -25
AT_NULL, AT_PHDR, AT_PHENT, AT_PHNUM, AT_PAGESZ, AT_ENTRY, AT_RANDOM = 0, 3, 4, 5, 6, 9, 25
PT_LOAD = 1
SUPERVISOR_CALL = 2
# Numbers of system calls: include/uapi/asm-generic/unistd.h of Linux.
WRITE, WRITEV, MMAP, MUNMAP, SCHED_GETAFFINITY, TKILL, EXITS = 64, 66, 222, 215, 123, 130, (93, 94)
ANSWERS = {
    29: ENOTTY,  # ioctl: the output is not a terminal
    96: 1,  # set_tid_address
    99: 0,  # set_robust_list
    132: 0,  # sigaltstack
    134: 0,  # rt_sigaction
    135: 0,  # rt_sigprocmask
    178: 1,  # gettid
    214: ENOMEM,  # brk: the C library then uses mmap
    226: 0,  # mprotect
    233: 0,  # madvise
}


def whole_pages(size: int) -> int:
    """``size`` in bytes, rounded up."""
    return (size + PAGE - 1) & -PAGE


class Process:
    """One program from its start to its exit."""

    def __init__(self, arguments: list[str]) -> None:
        self.machine = unicorn.Uc(unicorn.UC_ARCH_ARM64, unicorn.UC_MODE_ARM)
        self.machine.ctl_set_cpu_model(arm64.UC_CPU_ARM64_A57)  # NEON, and none of its extensions
        self.machine.reg_write(arm64.UC_ARM64_REG_CPACR_EL1, 3 << 20)  # floating point is not trapped
        self.machine.mem_map(STACK, STACK_SIZE)
        self.machine.mem_map(HEAP, HEAP_SIZE)
        self.next_page, self.status, self.unknown = HEAP, None, ""
        self.unmapped: dict[int, list[int]] = {}  # by size
        self.load(Path(arguments[0]).read_bytes(), arguments)
        self.machine.hook_add(unicorn.UC_HOOK_INTR, self.interrupt)

    def load(self, program: bytes, arguments: list[str]) -> None:
        """The segments of an ELF file, and the stack with the arguments and the auxiliary vector."""
        machine, form = struct.unpack_from("<H", program, 18)[0], program[:6]
        if form != b"\x7fELF\x02\x01" or machine != 183:
            raise SystemExit(
                f"{arguments[0]} is not a program for AArch64; compile it with a compiler for aarch64-linux-musl"
            )
        self.entry, headers = struct.unpack_from("<QQ", program, 24)
        size, count = struct.unpack_from("<HH", program, 54)
        mapped, first = set(), None
        for i in range(count):
            kind, _, offset, address, _, in_file, in_memory = struct.unpack_from(
                "<IIQQQQQ", program, headers + i * size
            )
            if kind != PT_LOAD:
                continue
            if offset == 0:
                first = address
            for page in range(address // PAGE, (address + in_memory - 1) // PAGE + 1):
                if page not in mapped:
                    self.machine.mem_map(page * PAGE, PAGE)
                    mapped.add(page)
            self.machine.mem_write(address, program[offset : offset + in_file])
        top = STACK + STACK_SIZE - PAGE
        pointers = []
        for argument in arguments:
            text = argument.encode() + b"\0"
            top -= len(text)
            self.machine.mem_write(top, text)
            pointers.append(top)
        top = (top - 16) & ~15
        auxiliary = [AT_PHDR, first + headers, AT_PHENT, size, AT_PHNUM, count, AT_PAGESZ, PAGE, AT_ENTRY, self.entry]
        auxiliary += [AT_RANDOM, top, AT_NULL, 0]
        words = [len(arguments), *pointers, 0, 0, *auxiliary]  # no environment
        stack = (top - 8 * len(words)) & ~15
        self.machine.mem_write(stack, struct.pack(f"<{len(words)}Q", *words))
        self.machine.reg_write(arm64.UC_ARM64_REG_SP, stack)

    def run(self) -> int:
        """Until the program exits; its status."""
        try:
            self.machine.emu_start(self.entry, 0)
        except unicorn.UcError as error:
            at = self.machine.reg_read(arm64.UC_ARM64_REG_PC)
            raise SystemExit(f"the emulated processor stopped at {at:#x}: {error}") from error
        if self.unknown:
            raise SystemExit(self.unknown)
        if self.status is None:
            raise SystemExit("the program stopped before it called exit")
        return self.status

    def interrupt(self, machine: unicorn.Uc, number: int, _: object) -> None:
        """A system call: its number is in x8, its arguments are in x0 and so on, its result goes to x0."""
        values = [machine.reg_read(register) for register in X]
        if number != SUPERVISOR_CALL:
            self.unknown = f"exception {number} at {machine.reg_read(arm64.UC_ARM64_REG_PC):#x}"
            return machine.emu_stop()
        result = self.call(values[8], values)
        return machine.reg_write(X[0], result & (1 << 64) - 1)

    def call(self, number: int, values: list[int]) -> int:
        if number in ANSWERS:
            return ANSWERS[number]
        result = 0
        if number == WRITE:
            result = self.write(values[1], values[2])
        elif number == WRITEV:
            parts = self.machine.mem_read(values[1], 16 * values[2])
            for address, size in struct.iter_unpack("<QQ", parts):
                result += self.write(address, size)
        elif number == MMAP and (values[4] + 1) & 0xFFFF_FFFF == 0:  # no file
            result = self.map(values[1])
        elif number == MUNMAP:
            self.unmapped.setdefault(whole_pages(values[1]), []).append(values[0])
        elif number == SCHED_GETAFFINITY:  # one processor
            self.machine.mem_write(values[2], (1).to_bytes(8, "little"))
            result = 8
        else:
            if number in EXITS:
                self.status = values[0] & 0xFF
            elif number == TKILL:  # the program ends itself by a signal: abort()
                self.status = 128 + values[1]
            else:
                self.unknown = f"system call {number} is not emulated; add it to {__file__}"
            self.machine.emu_stop()
        return result

    def map(self, size: int) -> int:
        """The address of new memory. What was unmapped is used again where the size is the same."""
        size = whole_pages(size)
        if addresses := self.unmapped.get(size):
            self.machine.mem_write(addresses[-1], bytes(size))
            return addresses.pop()
        if self.next_page + size > HEAP + HEAP_SIZE:
            return ENOMEM
        self.next_page += size
        return self.next_page - size

    def write(self, address: int, size: int) -> int:
        if size:
            os.write(1, self.machine.mem_read(address, size))
        return size


if __name__ == "__main__":
    if len(sys.argv) < 2:
        raise SystemExit(__doc__)
    sys.exit(Process(sys.argv[1:]).run())
