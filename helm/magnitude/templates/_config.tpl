{{- /* One TOML value. JSON scalars are TOML scalars; a map becomes an inline table. */ -}}
{{- define "magnitude.toml.value" -}}
{{- if kindIs "map" . -}}
{ {{- range $i, $key := keys . | sortAlpha }}{{ if $i }},{{ end }} {{ $key | toJson }} = {{ get $ $key | toJson }}{{ end }} }
{{- else -}}
{{ toJson . }}
{{- end }}
{{- end }}

{{- /* The lines `key = value` of a map, sorted. */ -}}
{{- define "magnitude.toml.lines" -}}
{{- range $key := keys . | sortAlpha }}
{{ $key }} = {{ include "magnitude.toml.value" (get $ $key) }}
{{- end }}
{{- end }}

{{- /* Takes (dict "upstreams" …): one [[upstreams]] table each, with the key's mount path instead of its Secret. */ -}}
{{- define "magnitude.toml.upstreams" -}}
{{- range .upstreams }}

[[upstreams]]
{{- include "magnitude.toml.lines" (omit . "keySecret") }}
{{- if .keySecret }}
key_file = {{ printf "/etc/magnitude/upstreams/%s/key" .name | toJson }}
{{- end }}
{{- end }}
{{- end }}

{{- define "magnitude.toml.store" -}}
[store]
{{- if .Values.store.url }}
url = {{ .Values.store.url | toJson }}
{{- end }}
{{- include "magnitude.toml.lines" .Values.store.settings }}
{{- end }}

{{- /* Sections that the server's proxy and a sidecar have in common. */ -}}
{{- define "magnitude.toml.common" -}}
{{ include "magnitude.toml.store" . }}

[deadlines]
{{- include "magnitude.toml.lines" .Values.proxy.deadlines }}

[branches]
{{- include "magnitude.toml.lines" .Values.proxy.branches }}

[retry]
{{- include "magnitude.toml.lines" .Values.proxy.retry }}

[telemetry]
{{- include "magnitude.toml.lines" .Values.proxy.telemetry }}
{{- end }}

{{- /* The settings file of the server's proxy. */ -}}
{{- define "magnitude.toml" -}}
data_dir = "/var/lib/magnitude/proxy"
insecure = {{ .Values.auth.insecure }}

[listen]
host = "0.0.0.0"
port = {{ .Values.proxy.port }}
admin_host = "0.0.0.0"
admin_port = {{ .Values.proxy.adminPort }}
{{- include "magnitude.toml.lines" .Values.proxy.listen }}

[limits]
{{- include "magnitude.toml.lines" .Values.proxy.limits }}

[worker]
{{- if .Values.worker.enabled }}
mode = "attach"
socket = {{ include "magnitude.socket" . | quote }}
model = {{ .Values.model.name | toJson }}
aliases = {{ .Values.model.aliases | toJson }}
{{- else }}
mode = "none"
{{- end }}

{{ include "magnitude.toml.common" . }}
{{- include "magnitude.toml.upstreams" (dict "upstreams" .Values.upstreams) }}
{{- end }}

{{- /* The settings file of a sidecar: loopback only, no worker, by default this release's Service behind it. */ -}}
{{- define "magnitude.sidecar.toml" -}}
data_dir = "/var/lib/magnitude/proxy"

[listen]
host = "127.0.0.1"
port = {{ .Values.sidecar.port }}
{{- include "magnitude.toml.lines" .Values.proxy.listen }}

[worker]
mode = "none"

{{ include "magnitude.toml.common" . }}
{{- include "magnitude.toml.upstreams" (dict "upstreams" (include "magnitude.sidecar.upstreams" . | fromJsonArray)) }}
{{- end }}

{{- /* The sidecar's upstreams as a JSON array. */ -}}
{{- define "magnitude.sidecar.upstreams" -}}
{{- if .Values.sidecar.upstreams -}}
{{ toJson .Values.sidecar.upstreams }}
{{- else -}}
{{- $url := printf "http://%s.%s.svc:%d/v1" (include "magnitude.fullname" .) .Release.Namespace (int .Values.service.port) }}
{{- $server := dict "name" "magnitude" "kind" "magnitude" "url" $url }}
{{- if .Values.sidecar.keySecret.name }}
{{- $_ := set $server "keySecret" .Values.sidecar.keySecret }}
{{- end }}
{{- list $server | toJson }}
{{- end }}
{{- end }}

{{- /* The folder that holds it is made by the worker, with mode 0700: the volume itself belongs to root. */ -}}
{{- define "magnitude.socket" -}}
/run/magnitude/worker/worker.sock
{{- end }}

{{- define "magnitude.modelPath" -}}
{{- if eq .Values.model.pull "smollm2" -}}
/var/lib/magnitude/worker/models/smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
{{- else -}}
{{ .Values.model.path }}
{{- end }}
{{- end }}

{{- /* Whole cores of the worker's CPU limit, rounded up; 0 (all cores) without a limit. */ -}}
{{- define "magnitude.threads" -}}
{{- $cpu := dig "limits" "cpu" "0" .Values.worker.resources | toString }}
{{- if hasSuffix "m" $cpu -}}
{{ divf (trimSuffix "m" $cpu | float64) 1000 | ceil | int }}
{{- else -}}
{{ float64 $cpu | ceil | int }}
{{- end }}
{{- end }}

{{- /* The engine's settings as JSON. */ -}}
{{- define "magnitude.engine" -}}
{{- $defaults := dict "threads" (include "magnitude.threads" . | int) "kv_disk_mb" 4096 }}
{{- $fixed := dict "model_path" (include "magnitude.modelPath" .) "model_name" .Values.model.name }}
{{- $_ := set $fixed "kv_dir" "/var/lib/magnitude/worker/kv/default" }}
{{- $engine := mergeOverwrite $defaults .Values.worker.engine $fixed }}
{{- toJson $engine }}
{{- end }}
