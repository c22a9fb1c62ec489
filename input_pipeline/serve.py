"""Starts the parts of a tf.data service, for config.input.service.

    python -m input_pipeline.serve dispatcher PORT WORKER:PORT WORKER:PORT ...
    python -m input_pipeline.serve worker DISPATCHER:PORT WORKER:PORT

The dispatcher is told all of its workers, and each worker its own address as
the others see it. Both run until they are stopped, and serve any number of
training processes, which name them as "grpc://DISPATCHER:PORT".
"""

import sys

import tensorflow as tf


def start(arguments: list[str]):
  """Starts what the command line says: a dispatcher or a worker."""
  service = tf.data.experimental.service
  match arguments:
    case ["dispatcher", port, worker, *workers] if port.isdecimal():
      return service.DispatchServer(
        service.DispatcherConfig(
          port=int(port), worker_addresses=[worker, *workers]
        )
      )
    case ["worker", dispatcher, address] if ":" in address:
      return service.WorkerServer(
        service.WorkerConfig(
          dispatcher_address=dispatcher,
          worker_address=address,
          port=int(address.rpartition(":")[2]),
        )
      )
  raise SystemExit(__doc__)


if __name__ == "__main__":
  start(sys.argv[1:]).join()
