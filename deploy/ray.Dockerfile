# The image of deploy/kuberay.yaml: docker build -t saccade . && docker build -t saccade-ray -f deploy/ray.Dockerfile .
FROM saccade

USER root
# KubeRay's probes call wget, and its login shell sets PATH anew.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends wget \
    && rm -rf /var/lib/apt/lists/* \
    && pip install "ray[serve]==2.60.0" \
    && echo 'export PATH=/opt/saccade/bin:$PATH' > /etc/profile.d/saccade.sh
USER saccade

# KubeRay gives the command: `ray start ...`.
ENTRYPOINT []
CMD ["bash"]
