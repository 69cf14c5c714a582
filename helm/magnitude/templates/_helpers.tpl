{{- define "magnitude.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" }}
{{- end }}

{{- define "magnitude.fullname" -}}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" }}
{{- else if contains (include "magnitude.name" .) .Release.Name }}
{{- .Release.Name | trunc 40 | trimSuffix "-" }}
{{- else }}
{{- printf "%s-%s" .Release.Name (include "magnitude.name" .) | trunc 40 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{- define "magnitude.selectorLabels" -}}
app.kubernetes.io/name: {{ include "magnitude.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "magnitude.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" }}
{{ include "magnitude.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{- define "magnitude.serviceAccountName" -}}
{{- if .Values.serviceAccount.create }}
{{- default (include "magnitude.fullname" .) .Values.serviceAccount.name }}
{{- else }}
{{- default "default" .Values.serviceAccount.name }}
{{- end }}
{{- end }}

{{- /* Takes (dict "image" … "root" $): repository@digest, or repository:tag with the appVersion as default. */ -}}
{{- define "magnitude.image" -}}
{{- if .image.digest -}}
{{ .image.repository }}@{{ .image.digest }}
{{- else -}}
{{ .image.repository }}:{{ default .root.Chart.AppVersion .image.tag }}
{{- end }}
{{- end }}

{{- define "magnitude.containerSecurityContext" -}}
runAsNonRoot: true
runAsUser: {{ .Values.userId | int64 }}
runAsGroup: {{ .Values.userId | int64 }}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
seccompProfile:
  type: RuntimeDefault
{{- end }}

{{- define "magnitude.podSecurityContext" -}}
runAsNonRoot: true
runAsUser: {{ .Values.userId | int64 }}
runAsGroup: {{ .Values.userId | int64 }}
fsGroup: {{ .Values.userId | int64 }}
fsGroupChangePolicy: OnRootMismatch
seccompProfile:
  type: RuntimeDefault
{{- end }}

{{- /* URL of an operated store as environment, because it holds a password; without one nothing. */ -}}
{{- define "magnitude.storeEnv" -}}
{{- with .Values.store.existingSecret }}
{{- if .name }}
- name: MAGNITUDE_REDIS_URL
  valueFrom:
    secretKeyRef:
      name: {{ .name }}
      key: {{ .key }}
{{- end }}
{{- end }}
{{- end }}

{{- /* The same for the server's proxy, which may also use the bundled Valkey. */ -}}
{{- define "magnitude.proxyEnv" -}}
{{- if .Values.valkey.enabled }}
- name: VALKEY_PASSWORD
  valueFrom:
    secretKeyRef:
      name: {{ .Values.valkey.auth.existingSecret }}
      key: {{ .Values.valkey.auth.key }}
- name: MAGNITUDE_REDIS_URL
  value: redis://:$(VALKEY_PASSWORD)@{{ include "magnitude.fullname" . }}-valkey:6379/0
{{- else }}
{{- include "magnitude.storeEnv" . }}
{{- end }}
{{- end }}

{{- /* Stops rendering when the values contradict each other; says which value to change. */ -}}
{{- define "magnitude.check" -}}
{{- if .Values.server.enabled }}
{{- include "magnitude.check.server" . }}
{{- else if not .Values.sidecar.enabled }}
{{- fail "server.enabled and sidecar.enabled are both false: nothing would be installed; enable one" }}
{{- else if not .Values.sidecar.upstreams }}
{{- fail "server.enabled is false and sidecar.upstreams is empty: the sidecar would have nothing behind it; add an upstream" }}
{{- end }}
{{- end }}

{{- define "magnitude.check.server" -}}
{{- $v := .Values }}
{{- if and (not $v.auth.existingSecret) (not $v.auth.insecure) }}
{{- fail "auth.existingSecret is empty: create a Secret with a line `KEY TENANT` (kubectl create secret generic magnitude-keys --from-literal=keys='sk-… default') and name it, or set auth.insecure=true where only trusted clients reach the Service" }}
{{- end }}
{{- if and (not $v.worker.enabled) (not $v.upstreams) }}
{{- fail "worker.enabled is false and upstreams is empty: nothing could answer; enable the worker or add an upstream" }}
{{- end }}
{{- if and $v.worker.enabled (not $v.model.pull) (not $v.model.path) }}
{{- fail "model.pull and model.path are both empty: set model.path to a GGUF file or a safetensors folder inside the worker" }}
{{- end }}
{{- $shared := or $v.store.url $v.store.existingSecret.name $v.valkey.enabled }}
{{- if and (gt (int $v.replicaCount) 1) (not $shared) }}
{{- fail "replicaCount is above 1 but each pod would keep its own sessions: set store.url, store.existingSecret.name or valkey.enabled" }}
{{- end }}
{{- if and $v.valkey.enabled (or $v.store.url $v.store.existingSecret.name) }}
{{- fail "valkey.enabled and store are both set: keep one of them" }}
{{- end }}
{{- if and $v.valkey.enabled (not $v.valkey.auth.existingSecret) }}
{{- fail "valkey.auth.existingSecret is empty: create a Secret with the entry `password` and name it" }}
{{- end }}
{{- if lt (int $v.terminationGracePeriodSeconds) (add (int $v.proxy.preStopSeconds) 15) }}
{{- fail "terminationGracePeriodSeconds is below proxy.preStopSeconds + 15: streams would be cut; raise it" }}
{{- end }}
{{- if eq (int $v.proxy.port) (int $v.proxy.adminPort) }}
{{- fail "proxy.port and proxy.adminPort are the same: change one" }}
{{- end }}
{{- end }}
