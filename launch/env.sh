# shellcheck shell=bash
# What every start of a run on many hosts sets; sourced by the other scripts.
# A variable that is set already stays as it is.

# Compiled programs, for the next start of this host.
export XDG_CACHE_HOME="${XDG_CACHE_HOME:-$HOME/.cache}"
# Python's prints at once: the last lines before an end are the ones that count.
export PYTHONUNBUFFERED=1
# TensorFlow only reads images here; from a bucket in large pieces, with retries.
export GCS_READ_CACHE_BLOCK_SIZE_MB="${GCS_READ_CACHE_BLOCK_SIZE_MB:-16}"
# Flags of the TPU compiler and runtime. None by default: docs/tpu.md says which
# are worth a try, and how to see what they change without a TPU.
export LIBTPU_INIT_ARGS="${LIBTPU_INIT_ARGS:-}"
# Collectives between hosts go directly; a proxy would make the start hang.
unset http_proxy https_proxy HTTP_PROXY HTTPS_PROXY all_proxy ALL_PROXY
