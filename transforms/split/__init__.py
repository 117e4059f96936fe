"""Cut a batch into optimiser steps and forward passes."""
