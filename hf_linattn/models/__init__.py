# Copyright 2026 The hf-linattn authors. Licensed under the Apache License, Version 2.0.
