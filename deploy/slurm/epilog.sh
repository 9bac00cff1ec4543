#!/bin/bash
# Epilog= in slurm.conf: as root, on each node, after a job. Copies the job's node-local histories to a place where its
# user can read them from any node: $SENTINEL_ARCHIVE/<uid>/<job id>/<node>/. It never fails, as that drains the node.
set -u
state=${SENTINEL_STATE:-/var/lib/sentinel}
archive=${SENTINEL_ARCHIVE:-}
job=${SLURM_JOB_ID:-}
user=${SLURM_JOB_UID:-}
[ -n "$archive" ] && [ -n "$job" ] && [ -n "$user" ] || exit 0

group=${SLURM_JOB_GID:-$(id -g "$user" 2>/dev/null || echo "$user")}
target=$archive/$user/$job/$(hostname -s)
shopt -s nullglob
for history in "$state/$user/runs/"*.sqlite; do
  name=${history##*/}
  [[ $name =~ (^|[^0-9])$job([^0-9]|$) ]] || continue # 417 is no part of 4170
  mkdir -p -m 0700 "$archive/$user" || exit 0
  chown -h "$user:$group" "$archive/$user" 2>/dev/null
  # SQLite's own backup is also correct if the daemon still writes, or was killed and left a write-ahead log. Below
  # their own folder users may have put links to anywhere, so the copy is written with their rights.
  if ! timeout 60 python3 - "$history" "$target/$name" "$user" "$group" <<'PYTHON'; then
import contextlib, os, sqlite3, sys

history, copy, user, group = sys.argv[1:]
with contextlib.closing(sqlite3.connect(history, isolation_level=None)) as of:
    of.execute("BEGIN")
    of.execute("SELECT count(*) FROM sqlite_master").fetchone()  # opens what only root may: the log beside it, too
    if os.getuid() == 0:
        os.setgroups([])
        os.setgid(int(group))
        os.setuid(int(user))
    os.umask(0o077)
    os.makedirs(os.path.dirname(copy), exist_ok=True)
    with contextlib.closing(sqlite3.connect(copy)) as to:
        of.backup(to)
PYTHON
    logger -t sentinel "job $job: $history was not copied to $target" 2>/dev/null
  fi
done
exit 0
