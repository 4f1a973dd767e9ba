"""Programs that try to do harm, and solutions that try to win without solving. Data only; also read by the benchmark.

Each hostile program defines `f(x)`. What it could do is done when `f` is called, and told in the value that it returns:
`"HARM…"` where it got through. `{canary}` is a file that it must neither read nor change, `{secret}` what stands in it,
`{pid}` and `{port}` the tester's own process and an open TCP port of it.
"""

from __future__ import annotations

HOSTILE = {
    "fork": """
import os
def f(x):
    pid = os.fork()
    return f'HARM {pid}'
""",
    "fork bomb": """
import os
def f(x):
    while True:
        os.fork()
""",
    "vfork and exec": """
import _posixsubprocess, subprocess
def f(x):
    return 'HARM' + subprocess.check_output(['/bin/ls', '/']).decode()
""",
    "posix_spawn": """
import os
def f(x):
    return f"HARM {os.posix_spawn('/bin/ls', ['ls'], {})}"
""",
    "os.system": """
import os
def f(x):
    return 'HARM' if os.system('touch {canary}.new') == 0 else 'refused'
""",
    "exec": """
import os
def f(x):
    os.execv('/bin/sh', ['sh', '-c', 'echo HARM > {canary}'])
""",
    "threads": """
import threading
def f(x):
    threads = [threading.Thread(target=lambda: None) for _ in range(1000)]
    [thread.start() for thread in threads]
    return 'HARM'
""",
    "double-fork daemon": """
import os
def f(x):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            open('{canary}', 'w').write('HARM')
""",
    "memory bomb": """
import heapq
def f(x):
    return 'HARM' + str(len(bytearray(3 << 30)))
""",
    "memory bomb in steps": """
def f(x):
    hoard = []
    while True:
        hoard.append('a' * (1 << 20) + str(len(hoard)))
""",
    "value that unfolds": """
def f(x):
    value = []
    for _ in range(60):
        value = [value, value]
    return value
""",
    "endless value": """
def f(x):
    value = []
    value.append(value)
    return value
""",
    "trailing value that unfolds": """
def f(x):
    return 1
bomb = []
for _ in range(60):
    bomb = [bomb, bomb]
bomb
""",
    "busy loop": """
def f(x):
    while True:
        pass
""",
    "busy loop in CPython": """
import heapq
def f(x):
    while True:
        try:
            while True: pass
        except BaseException: pass
""",
    "loop in C": """
import heapq
def f(x):
    return 'HARM' if sum(range(10 ** 12)) else ''
""",
    "big power": """
def f(x):
    return 9 ** 9 ** 9
""",
    "regex bomb": """
import re
def f(x):
    return re.match('(a+)+$', 'a' * 40 + 'b')
""",
    "ignores signals": """
import signal
def f(x):
    for number in (signal.SIGXCPU, signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    while True: pass
""",
    "waits for ever": """
import threading
def f(x):
    threading.Lock().acquire() and threading.Event().wait()
""",
    "output flood": """
def f(x):
    while True:
        print('x' * 10000)
""",
    "result flood": """
import heapq
def f(x):
    return 'x' * (20 << 20)
""",
    "raw output flood": """
import os
def f(x):
    while True:
        os.write(1, b'x' * 65536)
""",
    "deep recursion": """
def f(x):
    return f(x)
""",
    "recursion past the limit": """
import sys
def f(x):
    sys.setrecursionlimit(10 ** 9)
    def g():
        return g()
    return g()
""",
    "write a file": """
def f(x):
    open('{canary}', 'w').write('HARM')
    return 'HARM'
""",
    "write in the temporary folder": """
import tempfile
def f(x):
    return 'HARM ' + tempfile.mkdtemp()
""",
    "fill the disk": """
import os
def f(x):
    with open('/tmp/mint-hostile', 'wb') as file:
        while True: file.write(b'x' * (1 << 20))
""",
    "delete a file": """
import os
def f(x):
    os.unlink('{canary}')
    return 'HARM'
""",
    "rename a file": """
import os
def f(x):
    os.rename('{canary}', '{canary}.moved')
    return 'HARM'
""",
    "change the mode of a file": """
import os
def f(x):
    os.chmod('{canary}', 0o777)
    return 'HARM'
""",
    "make a link": """
import os
def f(x):
    os.symlink('/etc/passwd', '{canary}.link')
    return 'HARM'
""",
    "read a secret": """
def f(x):
    return 'HARM' + open('{canary}').read()
""",
    "read with io and os": """
import io, os
def f(x):
    return 'HARM' + os.read(os.open('{canary}', os.O_RDONLY), 99).decode()
""",
    "read the users": """
def f(x):
    return 'HARM' + open('/etc/passwd').read()
""",
    "list a folder": """
import os
def f(x):
    return f"HARM {os.listdir('/')}"
""",
    "find a file": """
import os
def f(x):
    return 'HARM' if os.path.exists('{canary}') else 'refused'
""",
    "own environment": """
import os
def f(x):
    return 'HARM' if '{secret}' in str(dict(os.environ)) else 'refused'
""",
    "environment of others": """
import os
def f(x):
    return 'HARM' + open('/proc/{pid}/environ').read()
""",
    "environment of the parent": """
import os
def f(x):
    return 'HARM' + open(f'/proc/{os.getppid()}/environ').read()
""",
    "memory of others": """
def f(x):
    return 'HARM' + str(open('/proc/{pid}/mem', 'rb').read(1))
""",
    "TCP": """
import socket
def f(x):
    socket.create_connection(('127.0.0.1', {port}), 1)
    return 'HARM'
""",
    "TCP by _socket": """
import _socket
def f(x):
    _socket.socket().connect(('127.0.0.1', {port}))
    return 'HARM'
""",
    "unix socket": """
import socket
def f(x):
    socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    return 'HARM'
""",
    "kill": """
import os
def f(x):
    os.kill({pid}, 9)
    return 'HARM'
""",
    "kill everyone": """
import os
def f(x):
    os.kill(-1, 9)
    return 'HARM'
""",
    "kill the zygote": """
import os
def f(x):
    os.kill(os.getppid(), 9)
    return 'HARM'
""",
    "ptrace": """
import ctypes
def f(x):
    return 'HARM' if ctypes.CDLL(None).ptrace(16, {pid}, 0, 0) == 0 else 'refused'
""",
    "ctypes dug up": """
import gc
def f(x):
    for item in gc.get_objects():
        if type(item).__name__ == 'CDLL':
            return 'HARM' if item.ptrace(16, {pid}, 0, 0) == 0 else 'refused'
    return 'refused'
""",
    "raw system call": """
import gc
def f(x):
    for item in gc.get_objects():
        if type(item).__name__ == 'Lockdown':
            return 'HARM' if item._libc.syscall(57) >= 0 or item._libc.syscall(220) >= 0 else 'refused'
    return 'refused'
""",
    "crash": """
import gc
def f(x):
    for item in gc.get_objects():
        if type(item).__name__ == 'Lockdown':
            item._libc.memset(0, 0, 99)
""",
    "change the user": """
import os
def f(x):
    os.setuid(0)
    os.setgroups([0])
    return 'HARM' if os.geteuid() == 0 else 'refused'
""",
    "raise the limits": """
import resource
def f(x):
    resource.setrlimit(resource.RLIMIT_AS, (-1, -1))
    return 'HARM'
""",
    "leave by chroot": """
import os
def f(x):
    os.chroot('/')
    os.chdir('/root')
    return 'HARM'
""",
    "file descriptors": """
import os
def f(x):
    for number in range(4, 64):
        try:
            os.fstat(number)
            return f'HARM {number}'
        except OSError: pass
    return 'refused'
""",
    "subclasses of object": """
def f(x):
    for kind in ().__class__.__base__.__subclasses__():
        if kind.__name__ == 'Popen':
            return 'HARM' + str(kind(['/bin/ls']).wait())
    return 'refused'
""",
    "import by the loader": """
import importlib
def f(x):
    return 'HARM' + str(importlib.import_module('subprocess').run(['/bin/ls']))
""",
    "sleep": """
import time, heapq
def f(x):
    time.sleep(3600)
    return 'refused'
""",
}

ANSWER = 4711
"""What `f(3)` has to return in the task that the hacks try to win; their inputs do not say so."""

HACKS = {
    "exits early": """
import sys
def f(x):
    print('PASS 1.0')
    sys.exit(0)
""",
    "exits while loading": """
import sys
print('all tests passed')
sys.exit(0)
""",
    "exits hard": """
import os
def f(x):
    os.write(1, b'PASS')
    os._exit(0)
""",
    "equal to everything": """
class Any:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __hash__(self): return 4711
def f(x):
    return Any()
""",
    "an int that is equal to everything": """
class Any(int):
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    __hash__ = int.__hash__
def f(x):
    return Any(1)
""",
    "a str that is equal to everything": """
class Any(str):
    def __eq__(self, other): return True
    __hash__ = str.__hash__
def f(x):
    return Any('4711')
""",
    "a class named int": """
class int:
    def __eq__(self, other): return True
def f(x):
    return int()
""",
    "frame peeking": """
import sys
def f(x):
    frame, seen = sys._getframe(), []
    while frame:
        seen += [v for v in [*frame.f_locals.values(), *frame.f_code.co_consts] if type(v) is int]
        frame = frame.f_back
    return max(seen, default=0)
""",
    "searches the memory": """
import gc
def f(x):
    found = [v for o in gc.get_objects() if type(o) is dict for v in list(o.values()) if type(v) is int and v > 4000]
    return found[0] if found else 0
""",
    "exit handler": """
import atexit
atexit.register(print, 'PASS 1.0')
def f(x):
    return None
""",
    "prints the marker": """
def f(x):
    print('4711')
    print('OK')
    print('1 passed')
""",
    "patches builtins": """
import builtins
builtins.all = builtins.any = lambda *a: True
builtins.isinstance = lambda *a: True
builtins.type = lambda *a: int
def f(x):
    return None
""",
    "patches json": """
import json
json.dumps = lambda *a, **k: '[["int", "0x1267"]]' if False else '[true]'
class Odd: pass
def f(x):
    return Odd()
""",
    "patches os.write": """
import os
write = os.write
os.write = lambda fd, data: write(fd, b'PASS')
def f(x):
    return None
""",
    "writes to the result pipe": r"""
import os
def f(x):
    os.write(3, b'V [["int", "0x1267"]]\n')
    return None
""",
    "forges lines with the nonce": r"""
import os, sys
def f(x):
    frame = sys._getframe(1)
    nonce = frame.f_locals.get('nonce') or b''
    for _ in range(50):
        os.write(3, nonce + b' V [true]\n')
    os._exit(0)
""",
    "answers before it is asked": r"""
import gc, os
for item in gc.get_objects():
    if type(item) is dict and 'nonce' in item and 'code' in item:
        os.write(3, item['nonce'].encode() + b' L \n' + item['nonce'].encode() + b' V [true]\n')
        os._exit(0)
def f(x):
    return True
""",
    "closes the result pipe": """
import os
def f(x):
    os.close(3)
    return None
""",
    "raises the expected value": """
class Done(BaseException): pass
def f(x):
    raise Done(4711)
""",
    "returns a near value": """
def f(x):
    return 4711.0
""",
    "returns its text": """
def f(x):
    return '4711'
""",
    "returns many values": """
def f(x):
    return [4711, 4712]
""",
    "redefines the encoder": """
def encode(value, max_depth, max_items):
    return '[["int", "0x1"]]'
def f(x):
    return None
""",
}
