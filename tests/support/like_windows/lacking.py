"""What Python has on Linux and not on Windows; read by ``sitecustomize`` before any package can be imported."""

from __future__ import annotations

MODULES = ("fcntl", "grp", "pty", "pwd", "resource", "termios", "tty")
SIGNALS = ("SIGALRM", "SIGCHLD", "SIGHUP", "SIGKILL", "SIGPIPE", "SIGQUIT", "SIGUSR1", "SIGUSR2", "setitimer")
FUNCTIONS = (
    *("O_CLOEXEC", "O_DIRECTORY", "O_NOFOLLOW", "O_NONBLOCK", "PRIO_PROCESS"),
    *(
        "chown",
        "fchown",
        "fork",
        "getegid",
        "geteuid",
        "getgid",
        "getpgid",
        "getpriority",
        "getuid",
        "killpg",
    ),
    *(
        "mkfifo",
        "posix_fadvise",
        "posix_fallocate",
        "pread",
        "preadv",
        "pwrite",
        "pwritev",
        "sched_getaffinity",
    ),
    *(
        "sched_setaffinity",
        "sendfile",
        "setgroups",
        "setpriority",
        "setsid",
        "statvfs",
        "sysconf",
        "uname",
        "wait4",
    ),
)
