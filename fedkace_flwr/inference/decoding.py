"""The decoders of the HTTP service (:mod:`fedkace_flwr.data.decoding`), which also take pictures out of forms."""

import sys

from fedkace_flwr.data.decoding import main
from fedkace_flwr.inference import forms

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], forms.file_in))
