"""``captum-ssm explain``, ``knockout`` and ``methods``."""
