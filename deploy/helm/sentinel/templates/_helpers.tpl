{{- define "sentinel.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}

{{- define "sentinel.selector" -}}
app.kubernetes.io/name: sentinel
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "sentinel.pod" -}}
{{ include "sentinel.selector" . }}
sentinel.daemon.metrics: "true"
{{- end -}}

{{- /* A pod restarts when settings or rules change. */ -}}
{{- define "sentinel.annotations" -}}
checksum/settings: {{ toJson (list .Values.settings .Values.rules) | sha256sum }}
{{- end -}}

{{- define "sentinel.env" -}}
- {name: SENTINEL_CONFIG, value: /etc/sentinel/sentinel.toml}
{{- if .Values.rules }}
- {name: SENTINEL_RULES, value: /etc/sentinel-rules}
{{- end }}
{{- with .Values.env }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "sentinel.mounts" -}}
- {name: history, mountPath: /var/lib/sentinel}
- {name: config, mountPath: /etc/sentinel, readOnly: true}
{{- if .Values.rules }}
- {name: rules, mountPath: /etc/sentinel-rules, readOnly: true}
{{- end }}
{{- end -}}

{{- define "sentinel.volumes" -}}
- {name: config, configMap: {name: {{ .Release.Name }}}}
{{- if .Values.rules }}
- {name: rules, configMap: {name: {{ .Release.Name }}-rules}}
{{- end }}
{{- end -}}
