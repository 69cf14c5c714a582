{{- /*
The worker's container. It has no probes on purpose: its first process is a watchdog that restarts an engine whose
step counter stands still, the proxy's readiness covers the worker, and a worker that is still loading must neither be
restarted nor take away a pod whose upstreams can answer.
*/ -}}
{{- define "magnitude.workerContainer" -}}
- name: worker
  image: {{ include "magnitude.image" (dict "image" .Values.worker.image "root" .) | quote }}
  imagePullPolicy: {{ .Values.worker.image.pullPolicy }}
  {{- if .Values.model.pull }}
  command:
    - sh
    - -c
    - magnitude pull "$0" --data-dir "$1" && exec python -m magnitude_engine.main watch --config "$2" --socket "$3"
    - {{ .Values.model.pull }}
    - /var/lib/magnitude/worker
    - {{ include "magnitude.engine" . | quote }}
    - {{ include "magnitude.socket" . }}
  {{- else }}
  command: [python, -m, magnitude_engine.main, watch]
  args:
    - --config={{ include "magnitude.engine" . }}
    - --socket={{ include "magnitude.socket" . }}
  {{- end }}
  lifecycle:
    preStop:
      exec:
        # The proxy's streams need the worker until the proxy has let them finish.
        command: [sleep, {{ add (int .Values.proxy.preStopSeconds) 11 | quote }}]
  securityContext:
    {{- include "magnitude.containerSecurityContext" . | nindent 4 }}
  resources:
    {{- include "magnitude.workerResources" . | nindent 4 }}
  volumeMounts:
    - {name: socket, mountPath: /run/magnitude}
    - {name: data, mountPath: /var/lib/magnitude}
    - {name: tmp, mountPath: /tmp, subPath: worker}
    {{- if .Values.model.existingClaim }}
    - {name: models, mountPath: /models, readOnly: true}
    {{- end }}
{{- end }}

{{- /* The worker's resources with its GPUs. */ -}}
{{- define "magnitude.workerResources" -}}
{{- $resources := deepCopy .Values.worker.resources }}
{{- if .Values.worker.gpu.count }}
{{- $gpu := dict .Values.worker.gpu.resource .Values.worker.gpu.count }}
{{- $_ := set $resources "limits" (merge $gpu (default dict $resources.limits)) }}
{{- end }}
{{- toYaml $resources }}
{{- end }}
