{{- /*
The proxy as a native sidecar of an agent's pod (Kubernetes 1.29 or newer): it starts before the agent, listens on
loopback, ends after it. Only the proxy is injected, so a loading engine never holds up an agent's start.
"magnitude.sidecar" is an item of `initContainers`, "magnitude.sidecar.volumes" items of `volumes`. Both take this
chart's own context; from a parent chart that is `.Subcharts.magnitude`.
*/ -}}
{{- define "magnitude.sidecar" -}}
{{- if semverCompare "<1.29.0-0" .Capabilities.KubeVersion.Version }}
{{- fail (printf "the magnitude sidecar needs Kubernetes 1.29 (native sidecars), this cluster has %s: run the proxy as an ordinary container or call the magnitude Service" .Capabilities.KubeVersion.Version) }}
{{- end }}
{{- if not .Values.sidecar.enabled }}
{{- fail "sidecar.enabled is false: set it so that the sidecar's ConfigMap exists" }}
{{- end }}
- name: magnitude
  restartPolicy: Always
  image: {{ include "magnitude.image" (dict "image" .Values.proxy.image "root" .) | quote }}
  imagePullPolicy: {{ .Values.proxy.image.pullPolicy }}
  # The flag wins over MAGNITUDE_PORT, which a Service called magnitude sets in every pod with service links.
  args: [serve, --config=/etc/magnitude/config/magnitude.toml, --port={{ .Values.sidecar.port }}]
  {{- with include "magnitude.storeEnv" . | trim }}
  env:
    {{- . | nindent 4 }}
  {{- end }}
  # The listener is on loopback, which only a command inside the container reaches.
  startupProbe:
    exec:
      command: {{ include "magnitude.liveCommand" (printf "http://127.0.0.1:%d" (int .Values.sidecar.port)) }}
    periodSeconds: 1
    timeoutSeconds: 5
    failureThreshold: 60
  livenessProbe:
    exec:
      command: {{ include "magnitude.liveCommand" (printf "http://127.0.0.1:%d" (int .Values.sidecar.port)) }}
    periodSeconds: 30
    timeoutSeconds: 10
  securityContext:
    {{- include "magnitude.containerSecurityContext" . | nindent 4 }}
  resources:
    {{- toYaml .Values.sidecar.resources | nindent 4 }}
  volumeMounts:
    - {name: magnitude-config, mountPath: /etc/magnitude/config, readOnly: true}
    - {name: magnitude-data, mountPath: /var/lib/magnitude}
    - {name: magnitude-data, mountPath: /tmp, subPath: tmp}
    {{- with include "magnitude.upstreamMounts" (dict "prefix" "magnitude-" "upstreams" (include "magnitude.sidecar.upstreams" . | fromJsonArray)) | trim }}
    {{- . | nindent 4 }}
    {{- end }}
{{- end }}

{{- define "magnitude.sidecar.volumes" -}}
- name: magnitude-config
  configMap:
    name: {{ include "magnitude.fullname" . }}-sidecar
- name: magnitude-data
  emptyDir: {sizeLimit: 1Gi}
{{- include "magnitude.upstreamVolumes" (dict "prefix" "magnitude-" "upstreams" (include "magnitude.sidecar.upstreams" . | fromJsonArray)) }}
{{- end }}

{{- /* Takes a base URL; a command that succeeds when the proxy there lives. */ -}}
{{- define "magnitude.liveCommand" -}}
[python, -c, "import urllib.request; urllib.request.urlopen('{{ . }}/health/live', timeout=4)"]
{{- end }}
