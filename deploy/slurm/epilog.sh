#!/bin/bash
# Epilog= in slurm.conf: as root, on each node, after a job. Copies the job's node-local histories to a place where its
# user can read them from any node: $SENTINEL_ARCHIVE/<uid>/<job id>/<node>/. It never fails, as that drains the node.
set -u
state=${SENTINEL_STATE:-/var/lib/sentinel}
archive=${SENTINEL_ARCHIVE:-}
job=${SLURM_JOB_ID:-}
user=${SLURM_JOB_UID:-}
[ -n "$archive" ] && [ -n "$job" ] && [ -n "$user" ] || exit 0

node=$(hostname -s)
target=$archive/$user/$job/$node
shopt -s nullglob
for history in "$state/$user/runs/"*"$job"*.sqlite; do
  mkdir -p "$target" || exit 0
  # SQLite's own backup is also correct if the daemon still writes, or was killed and left a write-ahead log.
  if ! timeout 60 python3 - "$history" "$target/$(basename "$history")" <<'PYTHON'; then
import contextlib, sqlite3, sys
with contextlib.closing(sqlite3.connect(sys.argv[1])) as of, contextlib.closing(sqlite3.connect(sys.argv[2])) as to:
    of.backup(to)
PYTHON
    logger -t sentinel "job $job: $history was not copied to $target" 2>/dev/null
  fi
done
[ -d "$target" ] && chown -R "$user" "$archive/$user/$job" 2>/dev/null
exit 0
