"""``captum-ssm explain`` and ``captum-ssm methods``."""
