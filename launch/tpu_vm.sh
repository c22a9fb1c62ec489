#!/usr/bin/env bash
# A run on all hosts of a Cloud TPU slice.
#
#   export TPU=NAME ZONE=us-central2-b
#   launch/tpu_vm.sh create v4-64        # or v5litepod-256, v6e-256, …
#   launch/tpu_vm.sh setup               # what is committed here, on every host
#   launch/tpu_vm.sh start --config=configs/vit_l16_jft.py \
#     --workdir=gs://BUCKET/NAME
#   launch/tpu_vm.sh log                 # of host 0, the one that speaks
#   launch/tpu_vm.sh stop                # SIGTERM: saves the step, then ends
#   launch/tpu_vm.sh delete
#
# `start` again after `stop`, or on another slice, goes on where the run was. The
# process ends on every host at the same step, and `launch/run.sh` starts it
# again where that helps. PROJECT may be set too, and WORKER to one host's number.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"

usage() {
  sed -n '2,/^set /p' "${BASH_SOURCE[0]}" | sed '$d;s/^# \{0,1\}//'
  exit 2
}

[[ $# -gt 0 ]] || usage
: "${TPU:?name of the TPU: export TPU=NAME}" "${ZONE:?its zone: export ZONE=…}"
action="$1"
shift
where=(--zone="$ZONE" ${PROJECT:+--project="$PROJECT"})
tpu=(gcloud compute tpus tpu-vm)

on_hosts() {  # WORKER COMMAND
  "${tpu[@]}" ssh "$TPU" "${where[@]}" --worker="$1" --command="$2"
}

case "$action" in
  create)
    : "${1:?type of the slice, such as v4-64}"
    type="$1"
    shift
    "${tpu[@]}" create "$TPU" "${where[@]}" --accelerator-type="$type" \
      --version="${VERSION:-tpu-ubuntu2204-base}" "$@"
    ;;
  setup)
    archive="$(mktemp --suffix=.tgz)"
    trap 'rm -f "$archive"' EXIT
    git -C "$here/.." archive --format=tgz --output="$archive" HEAD
    "${tpu[@]}" scp "$archive" "$TPU:vit_jax.tgz" "${where[@]}" --worker=all
    # Large pages: the TPU runtime starts and ends faster (v5e and newer).
    on_hosts all '
      set -e
      sudo sh -c "echo always > /sys/kernel/mm/transparent_hugepage/enabled"
      export PATH="$HOME/.local/bin:$PATH"
      command -v uv >/dev/null || pip install --quiet --user uv
      mkdir -p vit_jax && tar -xzf vit_jax.tgz -C vit_jax && cd vit_jax
      uv venv --quiet --allow-existing --seed --python=3.11 .venv
      uv pip install --quiet --python=.venv/bin/python \
        --requirement=requirements.lock --editable=".[tpu]"'
    ;;
  start)
    command="launch/run.sh$(printf ' %q' "$@")"
    on_hosts "${WORKER:-all}" "
      cd vit_jax
      if kill -0 \"\$(cat run.pid 2>/dev/null)\" 2>/dev/null; then
        echo 'A run is there already: launch/tpu_vm.sh stop' >&2
        exit 1
      fi
      nohup setsid bash $command >>run.log 2>&1 </dev/null &
      echo \$! >run.pid"
    ;;
  log)
    on_hosts "${WORKER:-0}" 'tail -n 100 -F vit_jax/run.log'
    ;;
  status)
    on_hosts "${WORKER:-all}" \
      'echo "$(hostname): $(tail -n 1 vit_jax/run.log 2>/dev/null)"'
    ;;
  stop)
    on_hosts "${WORKER:-all}" 'kill -TERM "$(cat vit_jax/run.pid)"'
    ;;
  delete)
    "${tpu[@]}" delete "$TPU" "${where[@]}"
    ;;
  *)
    usage
    ;;
esac
