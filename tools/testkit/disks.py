"""Disks on which an operation fails, for tests of what a failure leaves."""

from __future__ import annotations

import errno
import os

from accel_ckpt.disk import Disk


class FailingDisk(Disk):
    """Fails at the n-th call of one operation."""

    def __init__(self, operation, number, exchanges=True, code=errno.EIO):
        self.operation, self.left, self.exchanges, self.code = operation, number, exchanges, code
        self.failed = False

    def _count(self, operation):
        if operation == self.operation:
            self.left -= 1
            if self.left == 0:
                self.failed = True
                raise OSError(self.code, os.strerror(self.code), operation)

    def open_new(self, path):
        self._count("open_new")
        return super().open_new(path)

    def write(self, descriptor, data):
        self._count("write")
        return super().write(descriptor, data)

    def fsync(self, descriptor):
        self._count("fsync")
        super().fsync(descriptor)

    def mkdir(self, path):
        self._count("mkdir")
        super().mkdir(path)

    def rename(self, source, target):
        self._count("rename")
        super().rename(source, target)

    def link(self, source, target):
        self._count("link")
        super().link(source, target)

    def remove_tree(self, path):
        self._count("remove_tree")
        super().remove_tree(path)

    def exchange(self, first, second):
        if not self.exchanges:
            return False
        self._count("exchange")
        return super().exchange(first, second)


class PlainDisk(Disk):
    """A file system that cannot exchange names."""

    def exchange(self, first, second):
        return False


class StubbornDisk(Disk):
    """Cannot remove, or not even rename, folders of one checkpoint."""

    def __init__(self, name, operation):
        self.name, self.operation = name, operation

    def _refuse(self, operation, path):
        if self.operation == operation and f"{self.name}." in f"{path.name}.":
            raise PermissionError(errno.EPERM, "Operation not permitted", str(path))

    def remove_tree(self, path):
        self._refuse("remove", path)
        super().remove_tree(path)

    def rename(self, source, target):
        self._refuse("rename", source)
        super().rename(source, target)
