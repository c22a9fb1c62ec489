#!/usr/bin/env bash
# Runs one process of a training run again and again, until it is done.
#
#   launch/run.sh --config=configs/vit_l16_jft.py --workdir=gs://BUCKET/NAME
#
# The words are those of `python -m vit_jax.main`. It is started again where that
# may help: when another host is gone (75), when it was killed or aborted, when
# SIGTERM came to another host (143). It stays down when the run is done (0), is
# refused (2) or diverged (3), and when SIGTERM came to this script.
set -uo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
source "$here/env.sh"
cd "$here/.." || exit 1

python="${PYTHON:-.venv/bin/python}"
pause="${PAUSE:-10}"  # Seconds before another start.
stopped=""

trap 'stopped=1; kill -TERM "${child:-}" 2>/dev/null' TERM INT

while true; do
  "$python" -m vit_jax.main "$@" &
  child=$!
  wait "$child"
  status=$?
  # The trap interrupts the first wait; the run still saves its state.
  while kill -0 "$child" 2>/dev/null; do
    wait "$child"
    status=$?
  done
  case "$status" in 0 | 2 | 3) exit "$status" ;; esac
  if [[ -n "$stopped" ]]; then exit "$status"; fi
  echo "Ended with status $status; starting again in $pause s." >&2
  sleep "$pause" &
  wait $!
  if [[ -n "$stopped" ]]; then exit 143; fi
done
