{{- /* The proxy's container in the server's pod. */ -}}
{{- define "magnitude.proxyContainer" -}}
- name: proxy
  image: {{ include "magnitude.image" (dict "image" .Values.proxy.image "root" .) | quote }}
  imagePullPolicy: {{ .Values.proxy.image.pullPolicy }}
  args:
    - serve
    - --config=/etc/magnitude/config/magnitude.toml
    {{- if .Values.auth.existingSecret }}
    - --key-file=/etc/magnitude/keys/keys
    {{- end }}
  {{- with include "magnitude.proxyEnv" . | trim }}
  env:
    {{- . | nindent 4 }}
  {{- end }}
  ports:
    - {name: http, containerPort: {{ .Values.proxy.port }}, protocol: TCP}
    - {name: admin, containerPort: {{ .Values.proxy.adminPort }}, protocol: TCP}
  startupProbe:
    httpGet: {path: /health/live, port: http}
    periodSeconds: 2
    failureThreshold: 30
  livenessProbe:
    httpGet: {path: /health/live, port: http}
    periodSeconds: 10
    timeoutSeconds: 5
    failureThreshold: 3
  readinessProbe:
    # On the second listener it needs no key; metrics do there.
    httpGet: {path: /health/ready, port: admin}
    periodSeconds: 5
    timeoutSeconds: 3
    failureThreshold: 2
  lifecycle:
    preStop:
      exec:
        command: [sleep, {{ .Values.proxy.preStopSeconds | quote }}]
  securityContext:
    {{- include "magnitude.containerSecurityContext" . | nindent 4 }}
  resources:
    {{- toYaml .Values.proxy.resources | nindent 4 }}
  volumeMounts:
    - {name: config, mountPath: /etc/magnitude/config, readOnly: true}
    {{- if .Values.auth.existingSecret }}
    - {name: keys, mountPath: /etc/magnitude/keys, readOnly: true}
    {{- end }}
    {{- with include "magnitude.upstreamMounts" (dict "prefix" "" "upstreams" .Values.upstreams) | trim }}
    {{- . | nindent 4 }}
    {{- end }}
    - {name: data, mountPath: /var/lib/magnitude}
    - {name: tmp, mountPath: /tmp, subPath: proxy}
    {{- if .Values.worker.enabled }}
    - {name: socket, mountPath: /run/magnitude}
    {{- end }}
{{- end }}

{{- /* Takes (dict "upstreams" … "prefix" …): one mount for each upstream that has a key; "prefix" starts the volumes' names. */ -}}
{{- define "magnitude.upstreamMounts" -}}
{{- range $i, $upstream := .upstreams }}
{{- if $upstream.keySecret }}
- {name: {{ $.prefix }}upstream-{{ $i }}, mountPath: {{ printf "/etc/magnitude/upstreams/%s" $upstream.name | quote }}, readOnly: true}
{{- end }}
{{- end }}
{{- end }}

{{- define "magnitude.upstreamVolumes" -}}
{{- range $i, $upstream := .upstreams }}
{{- with $upstream.keySecret }}
- name: {{ $.prefix }}upstream-{{ $i }}
  secret:
    secretName: {{ .name }}
    defaultMode: 0440
    items:
      - {key: {{ .key | quote }}, path: key}
{{- end }}
{{- end }}
{{- end }}
