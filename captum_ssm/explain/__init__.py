"""The computations of the commands ``captum-ssm explain``, ``knockout`` and ``methods``."""
